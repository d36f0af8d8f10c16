"""Scores of pairs of texts: `/v1/rerank` (Jina, Cohere) and `/v1/score` (vLLM, SGLang).

`/v1/score` scores pairs of texts, or returns the probabilities of label tokens after a prompt. A
model with one label scores each pair itself; for a model that makes vectors, the score is their
cosine, or what `forms.py` says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Delta, Generation
from weft.json_types import JsonObject
from weft.messages.requests import PoolingParams
from weft.messages.status import Pools
from weft.server.body import read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.model_names import answering_name
from weft.server.operation import post
from weft.server.pooling.forms import Side, marked, similarity
from weft.server.pooling.inputs import (
    Input,
    Vector,
    answer,
    encoded,
    require_texts,
    start,
    usage,
)
from weft.server.pooling.models import PooledRequest, RerankRequest, ScoreRequest
from weft.text.tokenizer import Encoded


async def rerank(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, RerankRequest)
    if not body.documents:
        message = "documents is empty; 1 text or more is needed"
        raise ApiError(400, message, param="documents")
    require_texts("query", [body.query])
    texts: list[str] = []
    for document in body.documents:
        text = document
        if not isinstance(text, str):
            text = text.text
        texts.append(text)
    pairs = TextPairs(context, NamedTexts("query", [body.query]), NamedTexts("documents", texts))
    generation = await pairs.start(request, body)

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        scores = pairs.scores(vectors)
        # The sort is stable: equal documents stay in the client's order.
        order = sorted(range(len(texts)), key=lambda index: -scores[index])
        results: list[JsonObject] = []
        for index in order[: body.top_n]:
            result: JsonObject = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        total = usage(deltas)
        return {
            "id": f"rerank-{generation.completions[0].spec.request.rid}",
            "model": answering_name(context, body.model, body.lora_path),
            "results": results,
            "usage": total,
            "meta": {
                "api_version": {"version": "2"},
                "tokens": {"input_tokens": total["prompt_tokens"]},
            },
        }

    return answer(generation, "documents", make, first=pairs.first)


async def score(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, ScoreRequest)
    if body.label_token_ids is not None:
        return await _score_label_tokens(context, request, body)
    left = _either(body, "text_1", "queries")
    require_texts(left.name, left.texts)
    right = _either(body, "text_2", "documents")
    if len(left.texts) not in (1, len(right.texts)):
        message = (
            f"{len(left.texts):,} texts cannot be paired with {len(right.texts):,}; one with many, "
            "or as many on both sides, are allowed"
        )
        raise ApiError(400, message, param=right.name)
    pairs = TextPairs(context, left, right)
    generation = await pairs.start(request, body)

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        data: list[JsonObject] = []
        for index, value in enumerate(pairs.scores(vectors)):
            data.append(
                {
                    "index": index,
                    "object": "score",
                    "score": value,
                }
            )
        return {
            "id": f"score-{generation.completions[0].spec.request.rid}",
            "object": "list",
            "created": int(time.time()),
            "model": answering_name(context, body.model, body.lora_path),
            "data": data,
            "usage": usage(deltas),
        }

    return answer(generation, right.name, make, first=pairs.first)


class NamedTexts(NamedTuple):
    """The texts of a field, and its name."""

    name: str
    texts: Sequence[str]

    def param(self, index: int) -> str:
        """The name of a text in the request, for errors."""
        return self.name if len(self.texts) == 1 else f"{self.name}[{index}]"


class TextPairs:
    """Pairs of texts, as inputs of a model.

    A classifier gets pairs. A model that makes vectors gets each different left text once, then all
    right texts.
    """

    def __init__(self, context: ServerContext, left: NamedTexts, right: NamedTexts) -> None:
        """`left`: one text for all of `right`, or as many."""
        self._context = context
        self._left = left
        self._right = right
        self._pools = _scoring_pools(context)
        self._is_embedding = self._pools.task == "embed"
        self._queries: list[str] = []  # the different left texts, for a model that makes vectors
        if self._is_embedding:
            self._queries = list(dict.fromkeys(left.texts))

    @property
    def first(self) -> int:
        """The index of the first right text among the inputs."""
        return len(self._queries)

    async def start(self, request: Request, body: PooledRequest) -> Generation:
        right = self._right
        inputs: list[Input] = [*self._queries, *right.texts]
        names = [self._left.param(self._left.texts.index(query)) for query in self._queries]
        names += map(right.param, range(len(right.texts)))
        if not self._is_embedding:
            inputs = list(zip(self._paired, right.texts, strict=True))
        tokens = await encoded(self._context, inputs, body, param=right.name, names=names)
        query: Side = "query"
        document: Side = "document"
        sides = [query] * self.first + [document] * len(right.texts)
        tokens = marked(self._context, self._pools, inputs, tokens, sides, right.name)
        pooling = PoolingParams()
        if self._is_embedding and self._pools.form == "vector":
            pooling = PoolingParams(normalize=True)  # the product is the cosine then
        return start(self._context, request, body, tokens, pooling)

    @property
    def _paired(self) -> Sequence[str]:
        """The left text of each pair."""
        left = self._left.texts
        return left if len(left) > 1 else [left[0]] * len(self._right.texts)

    def scores(self, vectors: Sequence[Vector]) -> list[float]:
        """One score per pair."""
        if not self._is_embedding:
            return [float(vector[0]) for vector in vectors]
        of_query = dict(zip(self._queries, vectors, strict=False))
        of_right = vectors[self.first :]
        scores: list[float] = []
        for query, vector in zip(self._paired, of_right, strict=True):
            scores.append(similarity(self._pools, of_query[query], vector))
        return scores


def _scoring_pools(context: ServerContext) -> Pools:
    """The pooling of the model. Raises `ApiError` 400 if the model cannot score pairs."""
    pools = context.client.engine.pools
    name = context.info.model_name
    if pools is None:
        message = (
            f"{name} generates tokens; pairs need a model with one label or one that makes vectors "
            "(/v1/score with label_token_ids is served)"
        )
        raise ApiError(400, message, param="model")
    if pools.task == "classify" and pools.size != 1:
        message = f"{name} has {pools.size:,} labels; pairs need a model with one"
        raise ApiError(400, message, param="model")
    return pools


def _either(body: ScoreRequest, *names: str) -> NamedTexts:
    """The texts of a field that has several names. Raises `ApiError` unless exactly one is
    given."""
    names_sent = [name for name in names if getattr(body, name) is not None]
    if len(names_sent) != 1:
        message = f"give {' or '.join(names)}, or query, items and label_token_ids"
        raise ApiError(400, message, param=names[0])
    [name] = names_sent
    value = getattr(body, name)
    if not value:
        message = f"{name} is empty; 1 text or more is needed"
        raise ApiError(400, message, param=name)
    if isinstance(value, str):
        value = [value]
    return NamedTexts(name, value)


# ---- label tokens


async def _score_label_tokens(
    context: ServerContext,
    request: Request,
    body: ScoreRequest,
) -> ASGIApp:
    """The probabilities of the label tokens after query and item.

    With `apply_softmax`, relative to these tokens only.
    """
    labels = tuple(body.label_token_ids or ())
    if not labels or body.query is None or not body.items:
        message = "label tokens need query, items and label_token_ids"
        raise ApiError(400, message, param="label_token_ids")
    items = body.items
    if isinstance(items, str):
        items = [items]
    inputs = await _query_with_items(context, body, body.query, items)
    pooling = PoolingParams(label_ids=labels)
    generation = start(context, request, body, inputs, pooling)

    def make(vectors: list[Vector], deltas: list[Delta]) -> JsonObject:
        own = bool(body.apply_softmax)
        scores = [_probabilities(vector, own=own) for vector in vectors]
        return {
            "object": "scoring",
            "model": answering_name(context, body.model, body.lora_path),
            "scores": scores,
            "usage": usage(deltas),
        }

    return answer(generation, "items", make)


async def _query_with_items(
    context: ServerContext,
    body: ScoreRequest,
    query: str | list[int],
    items: Sequence[str | list[int]],
) -> list[Encoded]:
    """Query and item as one text, or as one list of ids."""
    joined: list[Input] = []
    for item in items:
        # Two texts or two lists of ids can be joined, but not a text and a list.
        if isinstance(query, str) != isinstance(item, str):
            message = "query and items must be all texts or all token ids"
            raise ApiError(400, message, param="items")
        first: Any = query
        second: Any = item
        if body.item_first:
            first = item
            second = query
        joined.append(first + second)
    return await encoded(context, joined, body, param="items")


def _probabilities(logprobs: Vector, *, own: bool) -> list[float]:
    """`own`: normalise over these tokens only, so that the values sum to 1."""
    if own:
        # Subtract the maximum, so that no power overflows.
        values = np.exp(logprobs - logprobs.max())
        values /= values.sum()
    else:
        values = np.exp(logprobs)
    found: list[float] = values.tolist()
    return found


_RERANK = "Order documents by a query"
_SCORE = "Score pairs of texts, or label tokens"
ROUTES = (
    post("/v1/rerank", rerank, _RERANK, RerankRequest),
    post("/v2/rerank", rerank, _RERANK, RerankRequest),
    post("/rerank", rerank, _RERANK, RerankRequest),
    post("/reranking", rerank, _RERANK, RerankRequest),
    post("/v1/score", score, _SCORE, ScoreRequest),
    post("/score", score, _SCORE, ScoreRequest),
)

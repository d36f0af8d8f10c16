"""How well texts go together: `/v1/rerank` (Jina, Cohere) and `/v1/score` of pairs (vLLM), or of
label tokens behind a prompt (SGLang).

A model with one label scores each pair by itself; a model that makes vectors scores by their
cosine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Delta, Generation
from weft.messages.pooling import PoolingParams
from weft.messages.status import Pools
from weft.server.body import read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.pooling.inputs import Input, Vector, answer, encoded, start, usage
from weft.server.pooling.models import PooledRequest, RerankRequest, ScoreRequest
from weft.text.tokenizer import Encoded


async def rerank(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, RerankRequest)
    context.require_model(body.model)
    if not body.documents:
        raise ApiError(400, "documents is empty", param="documents")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = Pairs(context, [body.query] * len(texts), texts, param="documents")
    generation = await pairs.start(request, body)

    def make(vectors: list[Vector], deltas: list[Delta]) -> dict[str, Any]:
        scores = pairs.scores(vectors)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in order
        ]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        total = usage(deltas)
        return {
            "id": f"rerank-{generation.completions[0].rid}",
            "model": context.info.model_name,
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
    context.require_model(body.model)
    if body.label_token_ids is not None:
        return await _label_tokens(context, request, body)
    left, right = (
        _either(body, *names) for names in (("text_1", "queries"), ("text_2", "documents"))
    )
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ApiError(
            400, f"{len(left):,} texts cannot be paired with {len(right):,}", param="text_2"
        )
    pairs = Pairs(context, left, right, param="text_2")
    generation = await pairs.start(request, body)

    def make(vectors: list[Vector], deltas: list[Delta]) -> dict[str, Any]:
        found = enumerate(pairs.scores(vectors))
        data = [{"index": index, "object": "score", "score": value} for index, value in found]
        return {
            "id": f"score-{generation.completions[0].rid}",
            "object": "list",
            "created": int(time.time()),
            "model": context.info.model_name,
            "data": data,
            "usage": usage(deltas),
        }

    return answer(generation, "text_2", make, first=pairs.first)


class Pairs:
    """Texts side by side, as a model takes them: pairs, or each different left text and all right
    ones alone.
    """

    def __init__(
        self, context: ServerContext, left: Sequence[str], right: Sequence[str], *, param: str
    ) -> None:
        self._context, self._left, self._right, self._param = context, left, right, param
        self._pools = _scoring(context)
        self._is_embedding = self._pools.task == "embed"
        self._queries = list(dict.fromkeys(left)) if self._is_embedding else []

    @property
    def first(self) -> int:
        """Where the right texts begin among the inputs."""
        return len(self._queries)

    async def start(self, request: Request, body: PooledRequest) -> Generation:
        inputs: list[Input] = [*self._queries, *self._right]
        if not self._is_embedding:
            inputs = list(zip(self._left, self._right, strict=True))
        tokens = await encoded(self._context, inputs, body, param=self._param)
        return start(self._context, request, body, tokens, PoolingParams())

    def scores(self, vectors: Sequence[Vector]) -> list[float]:
        """One for each pair."""
        if not self._is_embedding:
            return [float(vector[0]) for vector in vectors]
        of_query = dict(zip(self._queries, vectors, strict=False))
        pairs = zip(self._left, vectors[self.first :], strict=True)
        return [float(np.dot(of_query[query], vector)) for query, vector in pairs]


def _scoring(context: ServerContext) -> Pools:
    """Raises `ApiError` 400 for a model that cannot score pairs."""
    pools, name = context.client.engine.pools, context.info.model_name
    if pools is None:
        message = (
            f"{name} generates tokens; pairs need a model with one label or one that makes vectors"
        )
        raise ApiError(400, f"{message} (/v1/score with label_token_ids is served)", param="model")
    if pools.task == "classify" and pools.size != 1:
        raise ApiError(
            400, f"{name} has {pools.size:,} labels; pairs need a model with one", param="model"
        )
    return pools


def _either(body: ScoreRequest, *names: str) -> list[str]:
    """The texts of a field, by whichever of its names it was given."""
    given = [(name, getattr(body, name)) for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(
            400, f"give {' or '.join(names)}, or query, items and label_token_ids", param=names[0]
        )
    [(name, value)] = given
    if not value:
        raise ApiError(400, f"{name} is empty", param=name)
    return [value] if isinstance(value, str) else list(value)


async def _label_tokens(context: ServerContext, request: Request, body: ScoreRequest) -> ASGIApp:
    """Probabilities of the label tokens behind query and item; with `apply_softmax` of these tokens
    alone.
    """
    labels = tuple(body.label_token_ids or ())
    if not labels or body.query is None or not body.items:
        raise ApiError(
            400, "label tokens need query, items and label_token_ids", param="label_token_ids"
        )
    items = [body.items] if isinstance(body.items, str) else body.items
    inputs = await _prompts(context, body, body.query, items)
    generation = start(context, request, body, inputs, PoolingParams(label_ids=labels))

    def make(vectors: list[Vector], deltas: list[Delta]) -> dict[str, Any]:
        scores = [_probabilities(vector, own=bool(body.apply_softmax)) for vector in vectors]
        return {
            "object": "scoring",
            "model": context.info.model_name,
            "scores": scores,
            "usage": usage(deltas),
        }

    return answer(generation, "items", make)


async def _prompts(
    context: ServerContext,
    body: ScoreRequest,
    query: str | list[int],
    items: Sequence[str | list[int]],
) -> list[Encoded]:
    """Query and item as one text, or as ids one behind the other."""
    if isinstance(query, str):
        texts = [item for item in items if isinstance(item, str)]
        joined: list[Input] = [item + query if body.item_first else query + item for item in texts]
    else:
        lists = [item for item in items if not isinstance(item, str)]
        joined = [item + query if body.item_first else query + item for item in lists]
    if len(joined) != len(items):
        raise ApiError(400, "query and items must be all texts or all token ids", param="items")
    return await encoded(context, joined, body, param="items")


def _probabilities(logprobs: Vector, *, own: bool) -> list[float]:
    """`own`: of these tokens only, so that they sum to 1."""
    values = np.exp(logprobs - logprobs.max()) if own else np.exp(logprobs)
    found: list[float] = (values / values.sum() if own else values).tolist()
    return found

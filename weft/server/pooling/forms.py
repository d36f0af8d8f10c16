"""The forms of what a model makes of a text: a vector, a vector for each token (ColBERT), or
numbers of some tokens of its vocabulary (SPLADE). How each is written, compared, and marked.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np

from weft.json_types import JsonObject
from weft.messages.status import Pools
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.pooling.inputs import Input, Vector, require_lengths
from weft.text.tokenizer import Encoded

Side = Literal["query", "document"]
Written = list[float] | list[list[float]] | JsonObject | str


def written(
    pools: Pools,
    vector: Vector,
    encoding: str | None = None,
) -> Written:
    """What the API writes: numbers, or base64 of little-endian float32; a list of vectors; or
    the indices of numbers that are not 0, and these. Only a single vector is written in base64."""
    if pools.form == "tokens":
        rows: list[list[float]] = vector.reshape(-1, pools.size).tolist()
        return rows
    if pools.form == "sparse":
        indices = np.flatnonzero(vector)
        return {"indices": indices.tolist(), "values": vector[indices].tolist()}
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def similarity(
    pools: Pools,
    query: Vector,
    document: Vector,
) -> float:
    """The product of both. With a vector for each token: the sum over the query's tokens of the
    largest product with a token of the document. Source: arXiv:2004.12832, 3.3."""
    if pools.form != "tokens":
        return float(np.dot(query, document))
    products = query.reshape(-1, pools.size) @ document.reshape(-1, pools.size).T
    return float(products.max(axis=1).sum())


def require_vectors(pools: Pools, path: str) -> None:
    """Raise `ApiError` for a model with another form, which `path` cannot write."""
    if pools.form != "vector":
        message = f"{path} writes one vector for a text; /v1/embeddings has the form of this model"
        raise ApiError(400, message, param="model")


def marked(
    context: ServerContext,
    pools: Pools,
    parts: Sequence[Input],
    inputs: list[Encoded],
    sides: Sequence[Side],
    param: str,
) -> list[Encoded]:
    """The inputs with the mark of their side after the first token, if the model has marks; ids
    stay as they are. A text of the largest length gives up the token before its last one. Raises
    `ApiError` and `ContextExceeded`."""
    if not any(pools.markers):
        return inputs
    longest = context.client.engine.max_prompt_tokens
    found = []
    for part, one, side in zip(parts, inputs, sides, strict=True):
        mark = pools.markers[0 if side == "query" else 1]
        if isinstance(part, list) or not mark:
            found.append(one)
            continue
        ids = [one.ids[0], _mark_id(context, mark), *one.ids[1:]]
        types = [one.types[0], *one.types] if one.types else one.types
        if len(ids) == longest + 1 and len(ids) > 3:
            del ids[-2]
            types = types[: len(ids)]
        found.append(Encoded(ids, types))
    require_lengths(context, found, param)
    return found


def _mark_id(context: ServerContext, mark: str) -> int:
    id = context.tokenizer.token_id(mark)
    if id is None:
        message = f"the model marks its texts with {mark!r}, which its tokenizer has not"
        raise ApiError(500, message)
    return id

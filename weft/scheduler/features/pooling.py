"""Vectors of prompts, for the requests that ask for a vector instead of tokens.

The feature keeps no state: the parameters are in the request, and a vector is added to its reply at
once.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.messages.replies import PooledPiece
from weft.messages.requests import PoolingParams
from weft.plan.outputs import PooledVectors, PoolingRequest
from weft.plan.step import Result, find
from weft.scheduler.batch import Batch, End
from weft.scheduler.feature import Feature, StepEffects, StepInputs
from weft.scheduler.request import Columns, Request

NOT_FINITE = "the model's output was not finite"


class PoolingFeature(Feature):
    """Requests the vectors of prompts, and adds each to the reply of its request."""

    request_fields = ("pooling",)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        index: list[int] = []
        completes: list[bool] = []
        params: list[PoolingParams] = []
        for i, request in enumerate(batch.prefills):
            pooling = request.message.pooling
            if pooling is not None:
                index.append(i)
                completes.append(request.completes)
                params.append(pooling)
        if not index:
            return
        normalize: list[int] = []
        dimensions: list[int] = []
        label_ids: list[tuple[int, ...]] = []
        for one in params:
            normalize.append(_normalize(one))
            dimensions.append(one.dimensions)
            label_ids.append(one.label_ids)
        step.outputs.append(
            PoolingRequest(
                index=np.array(index, dtype=np.int32),
                completes=np.array(completes, dtype=np.bool_),
                normalize=np.array(normalize, dtype=np.int32),
                dimensions=np.array(dimensions, dtype=np.int32),
                types=_types(batch.prefills),
                labels=_labels(label_ids),
            )
        )

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        asked = find(batch.plan.outputs, PoolingRequest)
        output = find(result.outputs, PooledVectors)
        if asked is None or output is None:
            return
        for number, i in enumerate(asked.index.tolist()):
            row = int(batch.rows[i])
            if not asked.completes[number] or batch.epochs[i] != columns.epoch[row]:
                continue  # a middle chunk, or a request that has left
            request: Request = columns.requests[row]
            pooling = request.message.pooling
            assert pooling is not None
            size = pooling.dimensions or len(pooling.label_ids) or None
            if output.sizes is not None:
                size = int(output.sizes[number])
            vector = output.vectors[number, :size]
            if not np.isfinite(vector).all():
                effects.ends.append(End(row, "error", message=NOT_FINITE))
                continue
            packed = vector.astype(np.float32).tobytes()
            effects.aux.append(PooledPiece(id=request.id, vector=packed))


def _normalize(params: PoolingParams) -> int:
    """1 yes, 0 no, -1 as the model's configuration says."""
    if params.normalize is None:
        return -1
    return int(params.normalize)


def _types(prefills: list[Request]) -> IntArray | None:
    """[T] the segments of all tokens of a step; None if no request names any.

    Prompts of such requests are not cut: a step computes each of them from its first token to its
    last.
    """
    types: list[bytes] = []
    has_types = False
    for request in prefills:
        pooling = request.message.pooling
        own = b""
        if pooling is not None:
            own = pooling.token_type_ids
        has_types = has_types or bool(own)
        types.append(own or bytes(request.fill_len))
    if not has_types:
        return None
    return np.frombuffer(b"".join(types), dtype=np.uint8).astype(np.int32)


def _labels(ids: list[tuple[int, ...]]) -> IntArray | None:
    """[E, M], padded with 0; None if the first has no labels, because then no request has any."""
    if not ids[0]:
        return None
    labels = np.zeros((len(ids), max(map(len, ids))), dtype=np.int32)
    for row, own in zip(labels, ids, strict=True):
        row[: len(own)] = own
    return labels

"""Vectors of prompts, for the requests that want one instead of tokens. It keeps nothing: what is wanted stands in the
request, what was given goes straight into its reply."""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.messages.replies import Pooled
from weft.plan.step import Pooling, Result
from weft.scheduler.batch import Batch
from weft.scheduler.commit import End
from weft.scheduler.feature import Extras, Part, StepReplies
from weft.scheduler.request import Columns, Request

NOT_FINITE = "the model's output was not finite"


class PoolingPart(Part):
    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        found = [
            (i, request) for i, request in enumerate(batch.prefills) if request.pooling is not None
        ]
        if not found:
            return
        asked = [request.pooling for _, request in found if request.pooling is not None]
        extras.pooling = Pooling(
            index=np.array([i for i, _ in found], dtype=np.int32),
            completes=np.array([request.completes for _, request in found], dtype=np.bool_),
            normalize=np.array(
                [-1 if one.normalize is None else one.normalize for one in asked], dtype=np.int32
            ),
            dimensions=np.array([one.dimensions for one in asked], dtype=np.int32),
            types=_types(batch.prefills) if any(one.token_type_ids for one in asked) else None,
            labels=_labels([one.label_ids for one in asked]) if asked[0].label_ids else None,
        )

    def commit(self, batch: Batch, columns: Columns, result: Result, replies: StepReplies) -> None:
        wanted = batch.plan.wanted
        if (
            wanted is None
            or wanted.pooling is None
            or result.given is None
            or result.given.pooled is None
        ):
            return
        asked = wanted.pooling
        for at, i in enumerate(asked.index.tolist()):
            row = int(batch.rows[i])
            if not asked.completes[at] or batch.epochs[i] != columns.epoch[row]:
                continue  # a middle chunk, or a request that has left
            request: Request = columns.requests[row]
            assert request.pooling is not None
            size = request.pooling.dimensions or len(request.pooling.label_ids) or None
            vector = result.given.pooled[at, :size]
            if np.isfinite(vector).all():
                replies.given.append(
                    Pooled(id=request.id, vector=vector.astype(np.float32).tobytes())
                )
            else:
                replies.ends.append(End(row, "error", message=NOT_FINITE))


def _types(prefills: list[Request]) -> IntArray:
    """[T] the kinds of all tokens of a step. Where they are told, prompts come whole."""
    told = [
        b"" if request.pooling is None else request.pooling.token_type_ids for request in prefills
    ]
    whole = [
        types or bytes(request.fill_len) for types, request in zip(told, prefills, strict=True)
    ]
    return np.frombuffer(b"".join(whole), dtype=np.uint8).astype(np.int32)


def _labels(ids: list[tuple[int, ...]]) -> IntArray:
    """[E, M], filled up with 0."""
    labels = np.zeros((len(ids), max(map(len, ids))), dtype=np.int32)
    for at, one in enumerate(ids):
        labels[at, : len(one)] = one
    return labels

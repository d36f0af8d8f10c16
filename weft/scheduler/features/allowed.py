"""Requests that may choose among some tokens only, the same at every step: `allowed_token_ids`."""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.plan.step import Known, Mask
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request


class Allowed(Part):
    """Keeps the mask of each such row. It does not change with what is sampled: steps overlap behind it."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._masks: dict[int, IntArray] = {}  # [W] by row

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            if request.sampling.allowed_token_ids and request.row not in self._masks:
                self._masks[request.row] = self._packed(request.sampling.allowed_token_ids)
        if not self._masks:
            return
        found = [
            (i, self._masks[row])
            for i, row in enumerate(batch.sample_rows.tolist())
            if row in self._masks
        ]
        if found:
            index, masks = zip(*found, strict=True)
            extras.allowed = Mask(
                index=np.array(index, dtype=np.int32), promise=Known(np.stack(masks))
            )

    def release(self, request: Request) -> None:
        self._masks.pop(request.row, None)

    def _packed(self, ids: tuple[int, ...]) -> IntArray:
        bits = np.zeros(32 * self._num_words, dtype=np.bool_)
        bits[list(ids)] = True
        words: IntArray = np.packbits(bits, bitorder="little").view(np.int32)
        return words

"""Frequency, presence and repetition penalties: tells the sampler what each such request has seen and said."""

from __future__ import annotations

import numpy as np

from weft.plan.step import Penalties
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request


class PenaltiesPart(Part):
    def __init__(self) -> None:
        self._by_row: dict[int, tuple[float, float, float]] = {}  # frequency, presence, repetition
        self._begins: dict[int, int] = {}  # by row: from where on its tokens count

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            sampling = request.sampling
            values = (
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.repetition_penalty,
            )
            if values != (0.0, 0.0, 1.0):
                self._by_row[request.row] = values
                self._begins[request.row] = 0 if request.shares_kv else request.prompt_len
        if not self._by_row:
            return
        found = [
            (i, row) for i, row in enumerate(batch.sample_rows.tolist()) if row in self._by_row
        ]
        if not found:
            return
        index, rows = zip(*found, strict=True)
        begins = [self._begins[row] for row in rows]
        histories = [
            columns.tokens[row, self._begins[row] : columns.known_len[row]] for row in rows
        ]
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        offsets[1:] = np.cumsum([len(history) for history in histories])
        values_by_kind = np.array([self._by_row[row] for row in rows], dtype=np.float32).T
        extras.penalties = Penalties(
            index=np.array(index, dtype=np.int32),
            frequency=values_by_kind[0],
            presence=values_by_kind[1],
            repetition=values_by_kind[2],
            history=np.concatenate(histories),
            offsets=offsets,
            output_starts=offsets[:-1]
            + columns.prompt_len[list(rows)]
            - np.array(begins, dtype=np.int32),
            lacks_last=columns.known_len[list(rows)] < columns.seq_len[list(rows)] - 1,
        )

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)
        self._begins.pop(request.row, None)

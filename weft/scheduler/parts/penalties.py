"""Frequency, presence and repetition penalties: tells the sampler what each such request has seen and said."""

from __future__ import annotations

import numpy as np

from weft.executor.plan import Penalties
from weft.scheduler.batch import Batch
from weft.scheduler.part import Part, SamplingExtras
from weft.scheduler.request import Columns, Request


class PenaltiesPart(Part):
    def __init__(self) -> None:
        self._by_row: dict[int, tuple[float, float, float]] = {}  # frequency, presence, repetition

    def prepare(self, batch: Batch, columns: Columns, extras: SamplingExtras) -> None:
        for request in batch.prefills:
            sampling = request.sampling
            values = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
            if values != (0.0, 0.0, 1.0):
                self._by_row[request.row] = values
        if not self._by_row:
            return
        found = [(i, row) for i, row in enumerate(batch.sample_rows.tolist()) if row in self._by_row]
        if not found:
            return
        index, rows = zip(*found, strict=True)
        histories = [columns.tokens[row, : columns.known_len[row]] for row in rows]
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
            output_starts=offsets[:-1] + columns.prompt_len[list(rows)],
            lacks_last=columns.known_len[list(rows)] < columns.seq_len[list(rows)] - 1,
        )

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)

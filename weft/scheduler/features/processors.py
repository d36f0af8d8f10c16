"""Tells the sampler which requests have which logit processors, and what each of them has said so far.

A processor sees the whole output: steps of requests that have one are awaited, and nothing is planned ahead behind
them.
"""

from __future__ import annotations

import numpy as np

from weft.messages.sampling import Processor
from weft.plan.step import Processing
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Extras, Part
from weft.scheduler.request import Columns, Request


class LogitProcessors(Part):
    """Keeps the processors of each row that has some, in their order."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[Processor, ...]] = {}

    def prepare(self, batch: Batch, columns: Columns, extras: Extras) -> None:
        for request in batch.prefills:
            if request.sampling.processors:
                self._by_row[request.row] = request.sampling.processors
        if not self._by_row:
            return
        found = [
            (i, row) for i, row in enumerate(batch.sample_rows.tolist()) if row in self._by_row
        ]
        if found:
            extras.blocks_overlap = True
            extras.processors = self._rounds(found, columns)

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)

    def _rounds(self, found: list[tuple[int, int]], columns: Columns) -> tuple[Processing, ...]:
        """First the first ones of all requests, those of one name together; then the second ones; ..."""
        tokens = {row: columns.tokens[row, : columns.seq_len[row] - 1].copy() for _, row in found}
        rounds: list[Processing] = []
        for place in range(max(len(self._by_row[row]) for _, row in found)):
            there = [(i, row) for i, row in found if place < len(self._by_row[row])]
            for name in dict.fromkeys(self._by_row[row][place].name for _, row in there):
                own = [(i, row) for i, row in there if self._by_row[row][place].name == name]
                rounds.append(
                    Processing(
                        name=name,
                        index=np.array([i for i, _ in own], dtype=np.int32),
                        params=tuple(self._by_row[row][place].params for _, row in own),
                        tokens=tuple(tokens[row] for _, row in own),
                        prompt_lens=tuple(int(columns.prompt_len[row]) for _, row in own),
                    )
                )
        return tuple(rounds)

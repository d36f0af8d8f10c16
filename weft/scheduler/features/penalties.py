"""Frequency, presence and repetition penalties: gives the sampler the prompt and output so far of
such requests.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.plan.logits import Penalties
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class PenaltiesFeature(Feature):
    """Keeps, by row, the three penalties, and the position from which on the tokens count."""

    sampling_fields = ("frequency_penalty", "presence_penalty", "repetition_penalty")

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[float, float, float]] = {}  # frequency, presence, repetition
        self._begins: dict[int, int] = {}

    def enter_row(self, request: Request) -> None:
        sampling = request.message.sampling
        self._by_row[request.row] = (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        # The ids of a prompt of vectors mean nothing.
        self._begins[request.row] = 0 if request.message.shares_kv else request.spec.prompt_len

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._by_row)
        if found:
            index = np.array([i for i, _ in found], dtype=np.int32)
            step.logits.append(self._penalties(index, [row for _, row in found], columns))

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)
        self._begins.pop(request.row, None)

    def _penalties(self, index: IntArray, rows: list[int], columns: Columns) -> Penalties:
        histories = [
            columns.tokens[row, self._begins[row] : columns.known_len[row]] for row in rows
        ]
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        offsets[1:] = np.cumsum([len(history) for history in histories])
        begins = np.array([self._begins[row] for row in rows], dtype=np.int32)
        frequency, presence, repetition = np.array(
            [self._by_row[row] for row in rows], dtype=np.float32
        ).T
        return Penalties(
            index=index,
            frequency=frequency,
            presence=presence,
            repetition=repetition,
            history=np.concatenate(histories),
            offsets=offsets,
            output_starts=offsets[:-1] + columns.prompt_len[rows] - begins,
            lacks_last=columns.known_len[rows] < columns.seq_len[rows] - 1,
        )

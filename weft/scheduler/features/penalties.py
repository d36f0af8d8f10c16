"""Frequency, presence and repetition penalties: gives the sampler the prompt and the output so far
of the requests that use them.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.plan.logits import Penalties
from weft.scheduler.batch import Batch, SampledRows
from weft.scheduler.feature import Feature, StepInputs
from weft.scheduler.request import Columns, Request


class PenaltiesFeature(Feature):
    """Keeps, by row, the three penalties, and the position from which tokens count."""

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
        # A prompt of vectors has no meaningful ids.
        self._begins[request.row] = 0 if request.message.shares_kv else request.spec.prompt_len

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        found = batch.sampling_in(self._by_row)
        if found.rows:
            num_there = batch.num_there(columns)[found.index]
            step.logits.append(self._penalties(found, num_there, columns))

    def release(self, request: Request) -> None:
        self._by_row.pop(request.row, None)
        self._begins.pop(request.row, None)

    def _penalties(self, found: SampledRows, num_there: IntArray, columns: Columns) -> Penalties:
        """`num_there` [n]: how many tokens of each row have their ids in the columns."""
        rows = found.rows
        begins: IntArray = np.zeros(len(rows), dtype=np.int32)
        offsets: IntArray = np.zeros(len(rows) + 1, dtype=np.int32)
        penalties: FloatArray = np.zeros((len(rows), 3), dtype=np.float32)
        histories: list[IntArray] = []
        for number, row in enumerate(rows):
            begin = self._begins[row]
            history = columns.tokens[row, begin : num_there[number]]
            histories.append(history)
            begins[number] = begin
            offsets[number + 1] = offsets[number] + len(history)
            penalties[number] = self._by_row[row]
        return Penalties(
            index=found.index,
            frequency=penalties[:, 0],
            presence=penalties[:, 1],
            repetition=penalties[:, 2],
            history=np.concatenate(histories),
            offsets=offsets,
            output_starts=offsets[:-1] + columns.prompt_len[rows] - begins,
            lacks_last=num_there < np.array(found.lens, dtype=np.int32),
        )

"""The batch of one step, and the set of requests that decode.

(SGLang has one ScheduleBatch for both. Here a Batch is what one step runs and is never changed
afterwards; the running batch is an array of rows.)
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.plan.step import ForwardMode, Plan
from weft.scheduler.request import Columns, Request

NO_ROWS = np.empty(0, dtype=np.int32)


class RunningBatch:
    """The rows that decode, in the order in which they began to."""

    def __init__(self) -> None:
        self.rows: IntArray = NO_ROWS  # [n]

    def merge(self, rows: list[int]) -> None:
        if rows:
            self.rows = np.concatenate([self.rows, np.array(rows, dtype=np.int32)])

    def reset(self) -> None:
        """None decodes any more."""
        self.rows = NO_ROWS

    def remove(self, row: int) -> None:
        """Take a row out, if it is in."""
        self.rows = self.rows[self.rows != row]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Some of the requests that sample in a step: n of the S."""

    index: IntArray  # [n] which of them, 0..S-1
    rows: list[int]  # [n]


class Batch:
    """What one step runs: prefilled requests first, then decoding rows. R requests, S of them
    sample a token.
    """

    __slots__ = (
        *("mode", "plan", "prefills", "rows", "starts", "lens", "epochs"),
        *("sample_epochs", "sample_rows", "prompt_only_rows", "blocks_overlap"),
    )

    def __init__(
        self,
        mode: ForwardMode,
        prefills: list[Request],
        rows: IntArray,
        starts: IntArray,
        lens: IntArray,
        samples: BoolArray,
        columns: Columns,
    ) -> None:
        self.mode = mode
        self.prefills = prefills  # in the order of the first rows
        self.rows = rows  # [R]
        self.starts = starts  # [R] position of the first token of each in this step
        self.lens = lens  # [R] how many there are
        self.epochs: IntArray = columns.epoch[rows]  # [R]
        self.sample_rows: IntArray = rows[samples]  # [S]
        self.sample_epochs: IntArray = self.epochs[samples]  # [S]
        # Rows that end here, without a token, and their epochs.
        self.prompt_only_rows: list[tuple[int, int]] = []
        for request in prefills:
            if request.wants_tokens or not request.completes:
                continue
            epoch = int(columns.epoch[request.row])
            self.prompt_only_rows.append((request.row, epoch))
        self.blocks_overlap = False  # nothing is planned behind it before its result is known
        self.plan: Plan

    def sampling_in(self, rows: Container[int]) -> SampledRows:
        """Those of the sampling requests whose row is one of `rows`."""
        index: list[int] = []
        found: list[int] = []
        for i, row in enumerate(self.sample_rows.tolist()):
            if row in rows:
                index.append(i)
                found.append(row)
        return SampledRows(np.array(index, dtype=np.int32), found)

    def is_live(self, columns: Columns) -> BoolArray:
        """[S] whether each sampling request still has its row."""
        live: BoolArray = columns.epoch[self.sample_rows] == self.sample_epochs
        return live

"""Classes of requests: the higher priority goes first, and takes the place of running ones that are
far below it.

Within a class those that were retracted go first, then all as they came. Memory that runs out is
taken from the lowest class. How room is made for a waiting request is in `retraction.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.scheduler.policy import KeyPolicy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class Priority(KeyPolicy):
    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.classes = self
        self.displacement = self
        self._sign = 1 if context.settings.low_priority_first else -1

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        return table.priority[indices] * self._sign

    def rank(self, request: Request) -> int:
        return request.message.priority * self._sign

    def displaced(
        self, table: WaitingTable, indices: IntArray, newcomer: Request
    ) -> Iterator[Request]:
        """Those of a lower class: the lowest, and among these the latest first."""
        ranks = self.key(table, indices, newcomer.spec.arrival_s)
        own_rank = self.rank(newcomer)
        while True:
            # The last of equals: argmax finds the first of the reversed ones.
            last = len(indices) - 1 - int(np.argmax(ranks[::-1]))
            if ranks[last] <= own_rank:
                return
            yield table.request_at(int(indices[last]))
            ranks[last] = own_rank

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        ranks = self.context.columns.priority[rows] * self._sign
        is_far: BoolArray = ranks - self.rank(waiting) > self.context.settings.preemption_threshold
        return is_far


POLICY = Priority

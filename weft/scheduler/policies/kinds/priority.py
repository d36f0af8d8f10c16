"""Classes of requests: a higher priority goes first, and may retract running requests far below it.

Within a class, retracted requests go first, then the others in order of arrival. When memory runs
out, requests of the lowest class are retracted first. `retraction.py` makes room for a waiting
request.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.scheduler.policies.protocol import KeyPolicy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class Priority(KeyPolicy):
    lasts = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.classes = self
        self.displacement = self
        # The lowest key goes first, so a high priority becomes a low key.
        self._sign = -1
        if context.settings.low_priority_first:
            self._sign = 1

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        priority = table.priority.take(indices)
        return priority * self._sign

    def rank(self, request: Request) -> int:
        return request.message.priority * self._sign

    def displaced(
        self,
        table: WaitingTable,
        indices: LongArray,
        newcomer: Request,
    ) -> Iterator[Request]:
        """Requests of lower classes: the lowest class first, and the latest first in each class."""
        ranks = self.key(table, indices, newcomer.spec.arrival_s)
        own_rank = self.rank(newcomer)
        while True:
            # The last of equal ranks: argmax finds the first one of the reversed array.
            from_end = int(np.argmax(ranks[::-1]))
            last = len(indices) - 1 - from_end
            if ranks[last] <= own_rank:
                return
            index = int(indices[last])
            yield table.request_at(index)
            ranks[last] = own_rank

    def far_below(self, waiting: Request, rows: IntArray) -> BoolArray:
        priority = self.context.columns.priority.take(rows)
        ranks = priority * self._sign
        distance = ranks - self.rank(waiting)
        threshold = self.context.settings.preemption_threshold
        is_far: BoolArray = distance > threshold
        return is_far


POLICY = Priority

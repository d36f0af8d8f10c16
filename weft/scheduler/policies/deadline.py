"""Earliest deadline first, of those that can still be met.

A request's deadline is that of its first token (`ttft_ms`), or else of its end (`timeout_ms`).
Whoever cannot make it any more, by what prompts have cost so far, goes behind, with those that have
no deadline: serving it first would make others late, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.lanes.lanes import ONLY_LANE, Lanes
from weft.scheduler.policy import KeyPolicy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

TOGETHER = 16  # requests that are looked at at once
MAX_LATE = 64  # that are passed over so; then all are looked at


class DueTime:
    """When requests are due: a key that lasts."""

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray:
        return table.due_s.take(indices)


class EarliestDeadline(KeyPolicy):
    reads_cache = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._lanes = Lanes((DueTime(),))

    def key(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> DoubleArray:
        due_s = table.due_s.take(indices)
        num_tokens = table.fill_len.take(indices) - table.cached_len.take(indices)
        done_s = now + self._token_s() * num_tokens
        key: DoubleArray = np.where(done_s <= due_s, due_s, np.inf)
        return key

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        """Those that are due at some time stand in a lane; all before `now` is passed over."""
        self.look(table)
        lane = self._lanes.lanes.get(ONLY_LANE)
        if lane is None:
            return
        arrivals = (arrival for _, arrival in lane.within((now,), (math.inf,)) if arrival < end)
        named: list[int] = []
        num_late = 0
        while num_late < MAX_LATE:
            some = list(islice(arrivals, TOGETHER))
            if not some:
                break
            indices = table.indices_of(some)
            is_met = self.key(table, indices, now) < np.inf
            num_late += len(some) - int(is_met.sum())
            indices = indices[is_met]
            named += indices.tolist()
            yield from map(table.request_at, indices.tolist())
        if num_late < MAX_LATE:
            yield from self._those_left(table, end, set(named))
        else:
            indices = table.indices_before(end)
            is_left = np.isin(indices, named, invert=True)
            yield from self.order(table, indices[is_left], now)

    def look(self, table: WaitingTable) -> None:
        self._lanes.update(table)

    def _those_left(self, table: WaitingTable, end: int, named: set[int]) -> Iterator[Request]:
        """All that were not named, as they came."""
        for request in table.came_by(math.inf, end):
            if table.index_of(request) not in named:
                yield request

    def _token_s(self) -> float:
        """Seconds that a token of a prompt takes; 0 as long as nothing is known."""
        pace = self.context.pace
        cost = None if pace is None else pace.model()
        return 0.0 if cost is None else cost.token_s


POLICY = EarliestDeadline

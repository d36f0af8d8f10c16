"""Earliest deadline first, of those that can still be met.

A request's deadline is that of its first token (`ttft_ms`), or else of its end (`timeout_ms`).
Whoever cannot make it any more, by what prompts have cost so far, goes behind, with those that have
no deadline: serving it first would make others late, too.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from itertools import islice

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.lanes.lane import Lane
from weft.scheduler.lanes.lanes import ONLY_LANE, Lanes, LastingKey
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
        """Those that are due at some time stand in a lane."""
        self.look(table)
        named: set[int] = set()
        are_all = yield from self._met(table, self._lanes.lane(ONLY_LANE), end, now, named)
        if are_all:
            for request in table.came_by(math.inf, end):
                if request.spec.arrival_order not in named:
                    yield request
        else:
            indices = table.indices_before(end)
            is_left = np.isin(indices, table.indices_of(list(named)), invert=True)
            yield from self.order(table, indices[is_left], now)

    def look(self, table: WaitingTable) -> None:
        self._lanes.update(table)

    def lane_keys(self) -> tuple[LastingKey, ...]:
        return (DueTime(),)

    def order_lane(
        self, table: WaitingTable, lane: Lane, by_age: Lane, end: int, now: float
    ) -> Iterator[Request]:
        named: set[int] = set()
        are_all = yield from self._met(table, lane, end, now, named)
        left = (arrival for (arrival,) in by_age if arrival < end and arrival not in named)
        if are_all:
            for arrival in left:
                yield table.request_at(table.index_by_arrival(arrival))
        else:
            yield from self.order(table, table.indices_of(list(left)), now)

    def _met(
        self, table: WaitingTable, lane: Lane, end: int, now: float, named: set[int]
    ) -> Generator[Request, None, bool]:
        """Those of a lane that can be met; their arrivals are in `named` then.

        All before `now` is passed over. Returns whether these are all: not if many were late.
        """
        entries = lane.within((now,), (math.inf,))
        arrivals = (arrival for _, arrival in entries if arrival < end)
        num_late = 0
        while num_late < MAX_LATE:
            some = list(islice(arrivals, TOGETHER))
            if not some:
                return True
            is_met = self.key(table, table.indices_of(some), now) < np.inf
            for arrival, is_one in zip(some, is_met.tolist(), strict=True):
                if is_one:
                    named.add(arrival)
                    yield table.request_at(table.index_by_arrival(arrival))
            num_late += len(some) - int(is_met.sum())
        return False

    def _token_s(self) -> float:
        """Seconds that a token of a prompt takes; 0 as long as nothing is known."""
        pace = self.context.pace
        cost = None if pace is None else pace.model()
        return 0.0 if cost is None else cost.token_s


POLICY = EarliestDeadline

"""Earliest deadline first, among the requests that can still meet theirs.

A request's deadline is that of its first token (`ttft_ms`), or else of its end (`timeout_ms`). A
request that can no longer meet it, by the measured cost of prompts, goes after the others, like
those without a deadline: serving it first would make other requests late, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.policies.lanes.lane import Lane
from weft.scheduler.policies.lanes.lanes import ONLY_LANE, Lanes, StableKey
from weft.scheduler.policies.protocol import KeyPolicy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

# Requests that are tested together: first one, then twice as many each time, up to this number.
MOST_TOGETHER = 1_024


class DueTime:
    """The time at which requests are due: a key that lasts."""

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
        self.look(table)
        as_they_came = table.came_by(math.inf, end)
        return self.order_lane(table, self._lanes.lane(ONLY_LANE), as_they_came, end, now)

    def look(self, table: WaitingTable) -> None:
        self._lanes.update(table)

    def lane_keys(self) -> tuple[StableKey, ...]:
        return (DueTime(),)

    def order_lane(
        self,
        table: WaitingTable,
        lane: Lane,
        as_they_came: Iterator[Request],
        end: int,
        now: float,
    ) -> Iterator[Request]:
        """Skips all requests that were due before `now` without reading them."""
        entries = lane.within((now,), (math.inf,))
        arrivals = (arrival for _, arrival in entries if arrival < end)
        met: set[int] = set()
        num_together = 1
        while some := list(islice(arrivals, num_together)):
            is_met = self.key(table, table.indices_of(some), now) < np.inf
            for arrival, is_one in zip(some, is_met.tolist(), strict=True):
                if is_one:
                    met.add(arrival)
                    yield table.request_at(table.index_by_arrival(arrival))
            num_together = min(2 * num_together, MOST_TOGETHER)
        for request in as_they_came:
            if request.spec.arrival_order not in met:
                yield request

    def _token_s(self) -> float:
        """Seconds per token of a prompt; 0 until it is known."""
        cost = self.context.pace.model()
        return 0.0 if cost is None else cost.token_s


POLICY = EarliestDeadline

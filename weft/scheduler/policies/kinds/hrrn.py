"""Highest response ratio next: (time waited + work) / work.

The work of a request is its number of tokens to compute. Among requests with equal work, the oldest
always has the highest ratio. So there is a lane for each number of tokens, and only the first
request of each lane is compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from weft.arrays import LongArray
from weft.scheduler.policies.lanes.lane import Entry
from weft.scheduler.policies.lanes.lanes import Lanes
from weft.scheduler.policies.protocol import KeyPolicy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class ResponseRatio(KeyPolicy):
    reads_cache = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._lanes = Lanes((), self._work)
        self._heads: dict[int, int] = {}  # by lane, the arrival of its first request

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray:
        # The lowest key goes first, so it is the negative of the time waited; the 1 that the
        # ratio adds does not change the order.
        minus_waited_s = table.arrival_s.take(indices) - now
        return minus_waited_s / self._work(table, indices)

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        self.look(table)
        arrivals = [arrival for arrival in self._heads.values() if arrival < end]
        indices = table.indices_of(arrivals)
        keys = self.key(table, indices, now).tolist()
        works = self._work(table, indices).tolist()
        heap = list(zip(keys, arrivals, works, strict=True))
        heapq.heapify(heap)
        rest: dict[int, Iterator[Entry]] = {}  # of the lanes whose first request was named
        while heap:
            _, arrival, work = heap[0]
            request = table.find(arrival)
            if request is not None:
                yield request
            if work not in rest:
                rest[work] = self._lanes.of(work)
            following = next((one for (one,) in rest[work] if one > arrival), None)
            if following is None or following >= end:
                heapq.heappop(heap)
            else:
                # The value of `key` for one request.
                arrival_s = float(table.arrival_s[table.index_by_arrival(following)])
                heapq.heapreplace(heap, ((arrival_s - now) / work, following, work))

    def _work(self, table: WaitingTable, indices: LongArray) -> LongArray:
        """Tokens to compute [n]."""
        return table.fill_len.take(indices) - table.cached_len.take(indices)

    def look(self, table: WaitingTable) -> None:
        """Note the first request of each lane that has changed."""
        for number in self._lanes.update(table):
            first = self._lanes.lane(number).first()
            if first is None:
                self._heads.pop(number, None)
            else:
                self._heads[number] = first[-1]


POLICY = ResponseRatio

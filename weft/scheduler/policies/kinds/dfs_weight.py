"""Depth first through the prefix tree, the branch with the most waiting requests first.

Requests that share a long prefix then run together, while the prefix is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import BoolArray, LongArray
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policies.protocol import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, WaitingTable


class DepthFirst(Policy):
    reads_cache = True

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        if self.prefix_index is None or self.subtree_counts is None:
            return super().order(table, indices, now)
        return self._walk(table, table.used.marks(indices))

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        if self.prefix_index is None or end != EVERYBODY:
            return super().order_waiting(table, end, now)
        return self._walk(table, table.used.flags)

    def _walk(self, table: WaitingTable, is_asked: BoolArray) -> Iterator[Request]:
        assert self.prefix_index is not None
        assert self.subtree_counts is not None
        # A request is filed under the node where its cached prefix ends.
        for anchor in self.subtree_counts.heaviest_first():
            arrival_orders = self.prefix_index.arrivals_at(anchor)
            for arrival_order in arrival_orders:
                index = table.index_by_arrival(arrival_order)
                if is_asked[index]:
                    yield table.request_at(index)

    def new_counts(self) -> SubtreeCounts:
        return SubtreeCounts()


POLICY = DepthFirst

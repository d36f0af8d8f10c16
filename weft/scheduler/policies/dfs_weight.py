"""Depth first through the prefix tree, the branch with most waiting requests first.

So requests that share a long prefix run together, while the prefix is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import LongArray
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class DepthFirst(Policy):
    reads_cache = True

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        if self.prefix_index is None or self.subtree_counts is None:
            yield from super().order(table, indices, now)
            return
        is_asked = table.is_used
        if len(indices) < len(table):
            is_asked = table.marks(indices)
        # A request is filed under the node where its cached prefix ends.
        for anchor in self.subtree_counts.heaviest_first():
            arrival_orders = self.prefix_index.ending_at(anchor)
            for arrival_order in arrival_orders:
                index = table.index_by_arrival(arrival_order)
                if is_asked[index]:
                    yield table.request_at(index)

    def new_counts(self) -> SubtreeCounts:
        return SubtreeCounts()


POLICY = DepthFirst

"""Depth first through the prefix tree, the branch with most waiting requests first.

So neighbours in the tree run together.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import IntArray
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class DepthFirst(Policy):
    reads_cache = True

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        if self.prefix_index is None or self.subtree_counts is None:
            yield from super().order(table, indices, now)
            return
        for anchor in self.subtree_counts.heaviest_first():
            for arrival_order in self.prefix_index.ending_at(anchor):
                yield table.by_arrival(arrival_order)

    def new_counts(self) -> SubtreeCounts:
        return SubtreeCounts()


POLICY = DepthFirst

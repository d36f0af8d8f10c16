"""The order in which the leaves of the prefix cache are evicted: least recently used first.

A heap persists between calls and is corrected lazily: an entry has the last use of its node when it
was queued, and what was used since is queued again. So the cost of an eviction grows with the
evicted pages, not with the tree. It knows the tree, but no pages and no counts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container

from weft.memory.radix.tree import Node, RadixTree

LEFT_OVER = 1_024  # entries of evicted nodes that an order may have


class EvictionOrder:
    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        # `used` when the node was queued, `serial`, node. New leaves are in a separate queue in
        # order of creation: they need no heap, and a heap entry would add 72 bytes to the 620 of a
        # leaf.
        self._heap: list[tuple[int, int, Node]] = []
        self.new_leaves: deque[Node] = deque()
        # Leaves to evict before all others, and their last use when `cool` was called. They are in
        # one of the other queues, too; their entries there are left over when they are evicted.
        self._cool: deque[tuple[int, Node]] = deque()
        self._num_left_over = 0

    def __len__(self) -> int:
        """Entries, those that are left over included."""
        return len(self._heap) + len(self.new_leaves)

    def add(self, node: Node) -> None:
        """A node has become a free leaf."""
        if not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.used, node.serial, node))

    def cool(self, node: Node) -> None:
        """Let a free leaf go before all others, unless it is used again."""
        self._cool.append((node.used, node))

    def next_cool(self) -> Node | None:
        """The next leaf of those that `cool` named; None if there is none. It stays the next one
        until it is used or `cool_is_evicted`."""
        while self._cool:
            used, node = self._cool[0]
            if node.used == used and node.is_free and self._tree.has(node):
                return node
            self._cool.popleft()
        return None

    def cool_is_evicted(self) -> None:
        """All pages of the leaf of `next_cool` are evicted. The piece before it is next, if the
        same request was the last to use it."""
        used, node = self._cool.popleft()
        self._num_left_over += 1
        if node.parent is not None and node.parent.key:
            self._cool.appendleft((used, node.parent))
        if self._num_left_over > LEFT_OVER + len(self._heap) // 2:
            self._tidy()

    def take_oldest(self) -> Node:
        """Take the least recently used leaf out of the order. There must be a free one."""
        heap = self._heap
        new = self.new_leaves
        while True:
            if new and (not heap or (new[0].serial, new[0].serial) < heap[0][:2]):
                node = new.popleft()
                used = node.serial
            else:
                used, _, node = heapq.heappop(heap)
            if self._num_left_over and not self._tree.has(node):
                self._num_left_over -= 1
                continue
            node.is_queued = False
            # As in `is_free`, which would be called for each evicted leaf.
            if node.children or node.locks or node.pins:
                continue  # it is added again when it becomes a free leaf
            if node.used == used:
                return node
            self.add(node)  # used since

    def discard(self, gone: Container[Node]) -> None:
        """Take nodes out of the order that are about to be removed from the tree. This is rare, so
        it need not be fast."""
        self._heap = [entry for entry in self._heap if entry[2] not in gone]
        heapq.heapify(self._heap)
        self.new_leaves = deque(leaf for leaf in self.new_leaves if leaf not in gone)

    def clear(self) -> None:
        self._heap.clear()
        self.new_leaves.clear()
        self._cool.clear()
        self._num_left_over = 0

    def _tidy(self) -> None:
        """Drop the entries of evicted nodes."""
        has = self._tree.has
        self._heap = [entry for entry in self._heap if has(entry[2])]
        heapq.heapify(self._heap)
        self.new_leaves = deque(leaf for leaf in self.new_leaves if has(leaf))
        self._num_left_over = 0

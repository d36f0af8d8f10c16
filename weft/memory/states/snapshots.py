"""The snapshots that the prefix cache keeps of layers with a state.

To continue after a prefix, these layers need only the state after it, and it cannot be derived from
the state after another length. So a cached prefix can be resumed only where there is a copy of the
state after it, its *snapshot*. Snapshots belong to nodes of the radix tree, always to their ends:

    node A ── node B ─┬─ node C          one slot: the state after the last token of B
                      └─ node D

There are two kinds, and when slots are needed, all *spare* ones are evicted first.

- An *end*: the end of a prompt or an output, or a point where sequences diverge. The least recently
  used end is evicted first.
- A *spare* one: exactly one sequence continues after it, to another end.

A row that begins after a snapshot reads it in its first step. Until that step is planned, the
snapshot is *in use* and is not evicted. This listener follows the changes of the tree, and knows no
rows. Source of the rule what to keep: Marconi, arXiv:2411.19379.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.tree import Node, path_up

Slots: TypeAlias = OrderedDict[Node, int]  # least recently used first


class StateSnapshots:
    """The `CacheListener` of a radix tree. A node is in `ends` or in `spare`, or has no
    snapshot."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.ends: Slots = OrderedDict()
        self.spare: Slots = OrderedDict()
        self._in_use: dict[Node, int] = {}  # number of rows that will begin after each node
        self.total_evicted = 0  # since the start

    def __len__(self) -> int:
        return len(self.ends) + len(self.spare)

    @property
    def num_evictable(self) -> int:
        """Snapshots that no row holds. Pins are removed if necessary."""
        return len(self) - len(self._in_use)

    # Lookup

    def deepest(self, handle: Node | None, length: int) -> tuple[Node | None, int]:
        """The longest prefix of a cached sequence, of `length` tokens up to `handle`, that can be
        resumed: its end, and its number of tokens. Counts as a use."""
        end = length
        for node in path_up(handle):
            if self._use(node):
                return node, end
            end -= len(node.key) // TOKEN_BYTES
        return None, 0

    def hold(self, node: Node) -> None:
        """A row will begin after this snapshot. So a sequence continues here, and the snapshot
        becomes an end."""
        self._in_use[node] = self._in_use.get(node, 0) + 1
        slot = self.spare.pop(node, None)
        if slot is not None:
            self.ends[node] = slot

    def let_go(self, node: Node) -> None:
        self._in_use[node] -= 1
        if not self._in_use[node]:
            del self._in_use[node]

    def slot_of(self, node: Node) -> int:
        if node in self.ends:
            return self.ends[node]
        return self.spare[node]

    # Snapshots of rows

    def put(self, node: Node, slot: int) -> None:
        """Keep the state in `slot` at this node. The cache owns the slot from now on."""
        if self._use(node):
            self._free(slot)  # it has the same state already
            return
        self.ends[node] = slot
        self._demote_above(node)

    # Eviction

    def evict(self) -> bool:
        """Drop one snapshot. Returns whether there was one that may be dropped."""
        for slots in (self.spare, self.ends):
            for node in slots:
                # A pinned snapshot is dropped after its session has lost the pin.
                if node not in self._in_use and not self._is_pinned(node):
                    self._free(slots.pop(node))
                    self.total_evicted += 1
                    return True
        return False

    # Changes of the tree

    def inserted(self, leaf: Node) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        pass  # `lower` still has the same end

    def trimmed(self, leaf: Node) -> None:
        self.removed(leaf)

    def removed(self, leaf: Node) -> None:
        for slots in (self.ends, self.spare):
            slot = slots.pop(leaf, None)
            if slot is not None:
                self._free(slot)

    def emptied(self) -> None:
        for slots in (self.ends, self.spare):
            while slots:
                self._free(slots.popitem()[1])

    def forget(self) -> None:
        """Every slot has been freed: drop all snapshots, without reading them."""
        self.ends.clear()
        self.spare.clear()
        self._in_use.clear()

    # Observation

    def owned_slots(self) -> IntArray:
        """The slots of all snapshots, for the audit."""
        return np.array([*self.ends.values(), *self.spare.values()], dtype=np.int32)

    # Inside

    def _use(self, node: Node) -> bool:
        """Mark the snapshot of a node as used now. Returns whether there is one."""
        for slots in (self.ends, self.spare):
            if node in slots:
                slots.move_to_end(node)
                return True
        return False

    def _free(self, slot: int) -> None:
        self._allocator.free(np.array([slot], dtype=np.int32))

    def _demote_above(self, end: Node) -> None:
        """Make snapshots above a new end spare, if no sequence diverges between them and the next
        one."""
        parts = False
        for node in path_up(end):
            if node is end:
                continue
            parts = parts or len(node.children) > 1
            if node in self.ends and not parts and not self._is_pinned(node):
                self.spare[node] = self.ends.pop(node)
            if node in self.ends or node in self.spare:
                parts = False

    def _is_pinned(self, node: Node) -> bool:
        """Whether a pinned sequence ends here, or below without a snapshot in between."""
        num_pins = node.pins
        below = list(node.children.values())
        while below and num_pins:
            child = below.pop()
            if not child.pins:
                continue
            if child in self.ends or child in self.spare:
                num_pins -= child.pins
            else:
                below += child.children.values()
        return num_pins > 0

"""What the prefix cache keeps of layers with a state.

The state behind a prefix is all that these layers need of it, and it cannot be had from that of
another length. So a cached prefix can be resumed where a copy of the state behind it is there, its
*snapshot*. Snapshots stand at nodes of the radix tree, always at their ends:

    node A ── node B ─┬─ node C          one slot: the state behind the last token of B
                      └─ node D

There are two kinds of them, and when slots are needed, all *spare* ones go first.

- An *end*: of prompts and outputs, and places where sequences part. The one that was used least
  recently goes first.
- A spare one: a sequence goes on behind it to another end, and nothing else does.

A row that begins behind a snapshot reads it in its first step. Until that is planned the snapshot
is *held*, and stays. It follows the changes of the tree as a listener, and knows no rows. Source of
the rule what to keep: Marconi, arXiv:2411.19379.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix import Node, path_up

Slots: TypeAlias = OrderedDict[Node, int]  # the least recently used first


class StateSnapshots:
    """The `CacheListener` of a radix tree. A node is in `ends` or in `spare`, or has none."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self.ends: Slots = OrderedDict()
        self.spare: Slots = OrderedDict()
        self._held: dict[Node, int] = {}  # how many rows are to begin behind each
        self.total_evicted = 0  # since the start

    def __len__(self) -> int:
        return len(self.ends) + len(self.spare)

    @property
    def num_evictable(self) -> int:
        """Those that nobody holds. What sessions pin gives way."""
        return len(self) - len(self._held)

    # Lookup

    def deepest(self, handle: Node | None, length: int) -> tuple[Node | None, int]:
        """The longest prefix of a cached sequence, of `length` tokens up to `handle`, that can be
        resumed: where it ends, and its tokens. It counts as used now."""
        end = length
        for node in path_up(handle):
            if self._use(node):
                return node, end
            end -= len(node.key) // TOKEN_BYTES
        return None, 0

    def hold(self, node: Node) -> None:
        """A row is to begin behind this snapshot. So a sequence goes on here: it is worth being
        kept."""
        self._held[node] = self._held.get(node, 0) + 1
        slot = self.spare.pop(node, None)
        if slot is not None:
            self.ends[node] = slot

    def let_go(self, node: Node) -> None:
        self._held[node] -= 1
        if not self._held[node]:
            del self._held[node]

    def slot_of(self, node: Node) -> int:
        if node in self.ends:
            return self.ends[node]
        return self.spare[node]

    # What rows leave

    def put(self, node: Node, slot: int) -> None:
        """Keep the state in `slot` at this node. The slot is the cache's from now on."""
        if self._use(node):
            self._free(slot)  # it has the same state already
            return
        self.ends[node] = slot
        self._demote_above(node)

    # Eviction

    def evict(self) -> bool:
        """Drop one snapshot. Returns whether there was one that may go."""
        for slots in (self.spare, self.ends):
            for node in slots:
                # What a session pins goes when the session loses it.
                if node not in self._held and not self._is_pinned(node):
                    self._free(slots.pop(node))
                    self.total_evicted += 1
                    return True
        return False

    # The tree changes

    def inserted(self, leaf: Node) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        pass  # `lower` still ends where it did

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
        """Every slot has been taken back: drop all, without reading any of it."""
        self.ends.clear()
        self.spare.clear()
        self._held.clear()

    # Looking on

    def owned_slots(self) -> IntArray:
        """The slots of all snapshots, for the audit."""
        return np.array([*self.ends.values(), *self.spare.values()], dtype=np.int32)

    # Inside

    def _use(self, node: Node) -> bool:
        """Mark what is kept at a node as used now. Returns whether there is something."""
        for slots in (self.ends, self.spare):
            if node in slots:
                slots.move_to_end(node)
                return True
        return False

    def _free(self, slot: int) -> None:
        self._allocator.free(np.array([slot], dtype=np.int32))

    def _demote_above(self, end: Node) -> None:
        """Snapshots above a new end, between which and the next one no sequence parts, are not
        needed any more."""
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
        """Whether a pinned sequence ends here, or below with no snapshot between."""
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

"""Resume states: what a sequence needs besides K and V to be resumed at its end, in transfer
between memory and a store.

        states     the snapshot after the last token              one slot
        windows    the tail before the end of the last page       pages of one window
        neither    a sequence can be resumed after every page     nothing

    A store has resume states only after full blocks. This module knows nodes of the radix tree and
    numbers of tokens, never a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import NOBODY
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Match
from weft.memory.radix.cache import RadixCache
from weft.memory.radix.tree import Node, path_up
from weft.memory.states.group import StateGroup
from weft.memory.window.group import WindowGroup
from weft.memory.window.tails import Tail

# One resume state, or a fourth of the memory for resume states, may be in use for reads.
LARGEST_PART = 4


class ResumeStateMemory(Protocol):
    """The memory into which resume states are read: `StateGroup`, or `WindowPool`."""

    def give_back(self, taken: IntArray, /) -> None:
        """Free memory that was reserved."""
        ...

    def lose(self, taken: IntArray, /) -> None:
        """Memory that was reserved will never be free again."""
        ...

    def withhold(self, taken: IntArray, /) -> IntArray:
        """After all memory was freed, reserve the free part of this again. Returns that part."""
        ...


class ResumeStates(Protocol):
    @property
    def memory(self) -> ResumeStateMemory:
        """The memory that `reserve` takes."""
        ...

    @property
    def capacity(self) -> int:
        """Places of that memory, slots or pages; 0: sequences have no resume states."""
        ...

    def resumable(self, found: Match) -> int:
        """Number of tokens of a cached prefix after which it can be resumed."""
        ...

    def resumable_lengths(self, cache: RadixCache, key: CacheKey, block_len: int) -> list[int]:
        """The lengths in full blocks, shortest first, at which the cached part of a sequence can
        be resumed and should be stored."""
        ...

    def reserve(self, num_tokens: int, spare: float) -> IntArray | None:
        """Reserve memory for the resume state of a sequence of `num_tokens` tokens. `spare`: tokens
        of memory that running requests do not need. None: there is too little memory."""
        ...

    def arrived(self, node: Node, num_tokens: int, taken: IntArray) -> None:
        """The reserved memory has the resume state of the sequence that ends at `node`."""
        ...

    def hold(self, node: Node) -> IntArray:
        """The slots or pages of the resume state of the sequence that ends at `node`; it is kept
        until `let_go`."""
        ...

    def let_go(self, node: Node, in_use: IntArray) -> None: ...


class NoResumeStateMemory:
    def give_back(self, taken: IntArray) -> None:
        pass

    def lose(self, taken: IntArray) -> None:
        pass

    def withhold(self, taken: IntArray) -> IntArray:
        return NO_PAGES


class NoResumeStates:
    """For models without resume states: a sequence can be resumed wherever it is cached."""

    capacity = 0

    def __init__(self) -> None:
        self.memory = NoResumeStateMemory()

    def resumable(self, found: Match) -> int:
        return found.length

    def resumable_lengths(self, cache: RadixCache, key: CacheKey, block_len: int) -> list[int]:
        length = cache.peek(key) // block_len * block_len
        return [length] if length else []

    def reserve(self, num_tokens: int, spare: float) -> IntArray | None:
        return NO_PAGES

    def arrived(self, node: Node, num_tokens: int, taken: IntArray) -> None:
        pass

    def hold(self, node: Node) -> IntArray:
        return NO_PAGES

    def let_go(self, node: Node, in_use: IntArray) -> None:
        pass


class StateResumeStates:
    """The resume states of layers that keep a state: snapshots."""

    def __init__(self, states: StateGroup) -> None:
        self._states = states
        self.memory = states

    @property
    def capacity(self) -> int:
        return self._states.capacity

    def resumable(self, found: Match) -> int:
        _, length = self._states.snapshots.deepest(found.handle, found.length)
        return length

    def resumable_lengths(self, cache: RadixCache, key: CacheKey, block_len: int) -> list[int]:
        snapshots = self._states.snapshots
        found = []
        for node, _, end, cached in _cached_nodes(cache, key):
            is_there = node in snapshots.ends or node in snapshots.spare
            if is_there and end == cached and end % block_len == 0:
                found.append(end)
        found.reverse()
        return found

    def reserve(self, num_tokens: int, spare: float) -> IntArray | None:
        num_lent = self._states.num_lent
        if num_lent and num_lent >= self._states.capacity // LARGEST_PART:
            return None
        return self._states.lend()

    def arrived(self, node: Node, num_tokens: int, taken: IntArray) -> None:
        self._states.arrived(node, taken)

    def hold(self, node: Node) -> IntArray:
        snapshots = self._states.snapshots
        snapshots.hold(node)
        return np.array([snapshots.slot_of(node)], dtype=np.int32)

    def let_go(self, node: Node, in_use: IntArray) -> None:
        self._states.snapshots.let_go(node)


class WindowResumeStates:
    """The resume states of layers with windows: tails."""

    def __init__(self, windows: WindowGroup, block_len: int) -> None:
        self._windows = windows
        self.memory = windows.pool
        # So that an end after the last whole block also has the window before that block's end.
        windows.tails.more = max(block_len // windows.page_size, 1)

    @property
    def capacity(self) -> int:
        return self._windows.capacity // self._windows.page_size

    def resumable(self, found: Match) -> int:
        page_size = self._windows.page_size
        _, num_pages = self._windows.tails.deepest(found.handle, found.length // page_size)
        return num_pages * page_size

    def resumable_lengths(self, cache: RadixCache, key: CacheKey, block_len: int) -> list[int]:
        page_size = self._windows.page_size
        found = []
        for node, begin, _, cached in _cached_nodes(cache, key):
            length = cached // block_len * block_len
            if length > begin and self._windows.tails.can_resume(node, length // page_size):
                found.append(length)
        found.reverse()
        return found

    def reserve(self, num_tokens: int, spare: float) -> IntArray | None:
        windows = self._windows
        num_pages = windows.tails.num_pages_to_resume(num_tokens // windows.page_size)
        if num_pages * windows.page_size > spare:
            return None
        missing = num_pages - windows.pool.allocator.num_free
        if missing > 0:
            windows.tails.evict(missing)
        if num_pages > windows.pool.allocator.num_free:
            return None  # rows and pinned tails have them
        return windows.pool.alloc(num_pages, NOBODY)

    def arrived(self, node: Node, num_tokens: int, taken: IntArray) -> None:
        self._windows.tails.bring(node, Tail(taken, num_tokens // self._windows.page_size))
        self._windows.pool.give_back(taken)

    def hold(self, node: Node) -> IntArray:
        pages = self._windows.tails.pages_to_resume(node)
        self._windows.pool.hold(pages)
        return pages

    def let_go(self, node: Node, in_use: IntArray) -> None:
        self._windows.pool.give_back(in_use)


class CachedNode(NamedTuple):
    """A node with a part of a sequence. Numbers of tokens: where the node begins, where it ends,
    and where its part of the sequence ends."""

    node: Node
    begin: int
    end: int
    cached: int


def _cached_nodes(cache: RadixCache, key: CacheKey) -> Iterator[CachedNode]:
    """The nodes with the cached part of a sequence, the last node first."""
    location = cache.tree.locate(key, len(key.tokens))
    cached = location.length // TOKEN_BYTES
    path = list(path_up(location.handle))
    end = sum(len(node.key) for node in path) // TOKEN_BYTES
    for node in path:
        begin = end - len(node.key) // TOKEN_BYTES
        yield CachedNode(node, begin, end, min(end, cached))
        end = begin

"""Paths of the prefix cache that are kept for somebody who will come back, though no request runs on them.

A hold gives way: when memory is needed, the least recently used goes first, before anything else does (`KvMemory`
counts held pages as available). Knows names and tokens, never who they belong to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from weft.memory.prefix_cache import Handle, PrefixCache


class Lost(NamedTuple):
    """A hold that had to go."""

    name: str
    num_tokens: int
    why: str


class Hold:
    """One path, of whole pages. `drop` gives it back; after it was lost that does nothing."""

    def __init__(self, holds: Holds, name: str, handle: Handle, num_tokens: int) -> None:
        self._holds = holds
        self.name = name
        self.handle = handle
        self.num_tokens = num_tokens

    def touch(self) -> None:
        """It is used now: others go first."""
        self._holds.touch(self)

    def drop(self) -> None:
        self._holds.drop(self)


class Holds:
    """The holds on one cache, in the order of their last use."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._held: OrderedDict[Hold, None] = OrderedDict()  # the least recently used first
        self._lost: list[Lost] = []

    def __iter__(self) -> Iterator[Hold]:
        """The least recently used first."""
        return iter(self._held)

    def keep(self, name: str, namespace: str, tokens: bytes) -> Hold:
        """Hold as much of a sequence as is cached."""
        found = self._cache.match(namespace, tokens)
        hold = Hold(self, name, found.handle, found.length)
        if found.length:
            self._cache.hold(found.handle)
            self._held[hold] = None
        return hold

    def touch(self, hold: Hold) -> None:
        if hold in self._held:
            self._held.move_to_end(hold)

    def drop(self, hold: Hold) -> None:
        if hold in self._held:
            del self._held[hold]
            self._cache.let_go(hold.handle)

    def give_way(self, num_pages: int) -> None:
        """Let go, the least recently used first, until `num_pages` can be evicted or nothing is held."""
        while self._held and self._cache.evictable_pages < num_pages:
            self._lose(next(iter(self._held)), "its memory was needed")

    def lose_all(self, why: str) -> None:
        for hold in list(self._held):
            self._lose(hold, why)

    def forget_all(self, why: str) -> None:
        """The cache has been dropped as a whole: there is nothing to let go of."""
        lost = [Lost(hold.name, hold.num_tokens, why) for hold in self._held]
        self._held.clear()
        self._lost += lost

    def take_lost(self) -> list[Lost]:
        """What had to go since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _lose(self, hold: Hold, why: str) -> None:
        self._lost.append(Lost(hold.name, hold.num_tokens, why))
        self.drop(hold)

"""Paths of the prefix cache that stay for an owner who will come back, with no request on them.

A session pins the KV of its last turn. When memory is needed, the least recently used pin goes
first, before anything is refused (`KvMemory` counts pinned pages as available). Pins know names
and keys, never what the names belong to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from weft.memory.prefix_cache import CacheKey, Handle, PrefixCache


class LostPin(NamedTuple):
    """A pin that had to go."""

    name: str
    num_tokens: int
    why: str


class Pin:
    """One path, of whole pages. `drop` gives it back; after it was lost that does nothing."""

    def __init__(self, pins: Pins, name: str, handle: Handle, num_tokens: int) -> None:
        self._pins = pins
        self.name = name
        self.handle = handle
        self.num_tokens = num_tokens

    def touch(self) -> None:
        """It is used now: others go first."""
        self._pins.touch(self)

    def drop(self) -> None:
        self._pins.drop(self)


class Pins:
    """The pins on one cache, in the order of their last use."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pinned: OrderedDict[Pin, None] = OrderedDict()  # the least recently used first
        self._lost: list[LostPin] = []

    def __iter__(self) -> Iterator[Pin]:
        """The least recently used first."""
        return iter(self._pinned)

    def keep(self, name: str, key: CacheKey) -> Pin:
        """Pin as much of a sequence as is cached."""
        found = self._cache.match(key)
        pin = Pin(self, name, found.handle, found.length)
        if found.length:
            self._cache.pin(found.handle)
            self._pinned[pin] = None
        return pin

    def touch(self, pin: Pin) -> None:
        if pin in self._pinned:
            self._pinned.move_to_end(pin)

    def drop(self, pin: Pin) -> None:
        if pin in self._pinned:
            del self._pinned[pin]
            self._cache.unpin(pin.handle)

    def unpin_for(self, num_pages: int) -> None:
        """Drop pins, least recently used first, until `num_pages` are evictable or none is left."""
        while self._cache.evictable_pages < num_pages and self.unpin_oldest():
            pass

    def unpin_oldest(self) -> bool:
        """Drop the least recently used pin for its memory. Returns whether there was one."""
        if not self._pinned:
            return False
        self._lose(next(iter(self._pinned)), "its memory was needed")
        return True

    def lose_all(self, why: str) -> None:
        for pin in list(self._pinned):
            self._lose(pin, why)

    def forget_all(self, why: str) -> None:
        """The cache has been dropped as a whole: there is nothing to unpin."""
        for pin in self._pinned:
            self._lost.append(LostPin(pin.name, pin.num_tokens, why))
        self._pinned.clear()

    def take_lost(self) -> list[LostPin]:
        """The pins that had to go since the last call."""
        lost = self._lost
        self._lost = []
        return lost

    def _lose(self, pin: Pin, why: str) -> None:
        self._lost.append(LostPin(pin.name, pin.num_tokens, why))
        self.drop(pin)

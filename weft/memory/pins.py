"""Paths of the prefix cache that stay for an owner who will come back, with no request on them.

There are two kinds. A session pins the KV of its last turn: when memory is needed, the least
recently used of these pins goes first, before anything is refused (`KvMemory` counts their pages as
available). A *firm* pin is a lock, so that its pages are not available: it gives way only where a
request could otherwise not run at all, and then becomes one of the first kind. Pins know names and
keys, never what the names belong to.

    keep_firm ─▶ firm ── give_way ─▶ pinned ── its memory is needed ─▶ lost
                  ▲                    │
                  └────── harden ──────┘
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

    def __init__(
        self, pins: Pins, name: str, handle: Handle, num_tokens: int, *, is_told: bool
    ) -> None:
        self._pins = pins
        self.name = name
        self.handle = handle
        self.num_tokens = num_tokens
        self.is_told = is_told  # `take_lost` tells that it was lost
        self.why_lost = ""  # nothing: it is there

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
        self._firm: OrderedDict[Pin, None] = OrderedDict()  # likewise
        self._lost: list[LostPin] = []
        self.num_given_way = 0  # firm ones, since the start

    def __iter__(self) -> Iterator[Pin]:
        """Those that are not firm, the least recently used first."""
        return iter(self._pinned)

    @property
    def firm(self) -> Iterator[Pin]:
        """The least recently used first."""
        return iter(self._firm)

    def is_firm(self, pin: Pin) -> bool:
        return pin in self._firm

    def keep(self, name: str, key: CacheKey) -> Pin:
        """Pin as much of a sequence as is cached."""
        return self._pin(name, key, is_told=True)

    def keep_softly(self, name: str, key: CacheKey) -> Pin:
        """The same, for an owner who looks at `Pin.why_lost`."""
        return self._pin(name, key, is_told=False)

    def keep_firm(self, name: str, key: CacheKey) -> Pin:
        """Pin as much of a sequence as is cached, so that its memory is not available. Its owner
        looks at `Pin.why_lost`."""
        found = self._cache.match(key)
        pin = Pin(self, name, found.handle, found.length, is_told=False)
        if found.length:
            self._cache.lock(found.handle)
            self._firm[pin] = None
        return pin

    def harden(self, pin: Pin) -> None:
        """Let a pin that has given way be firm again. Does nothing for one that was lost."""
        if pin in self._pinned:
            # The lock first: between the two its pages must not become evictable.
            self._cache.lock(pin.handle)
            self._cache.unpin(pin.handle)
            del self._pinned[pin]
            self._firm[pin] = None

    def give_way(self) -> bool:
        """Let the least recently used firm pin go where its memory is needed. Returns whether there
        was one."""
        if not self._firm:
            return False
        pin, _ = self._firm.popitem(last=False)
        self.num_given_way += 1
        self._cache.pin(pin.handle)
        self._cache.unlock(pin.handle)
        self._pinned[pin] = None
        return True

    def touch(self, pin: Pin) -> None:
        if pin in self._pinned:
            self._pinned.move_to_end(pin)
        elif pin in self._firm:
            self._firm.move_to_end(pin)

    def drop(self, pin: Pin) -> None:
        if pin in self._pinned:
            del self._pinned[pin]
            self._cache.unpin(pin.handle)
        elif pin in self._firm:
            del self._firm[pin]
            self._cache.unlock(pin.handle)

    def unpin_for(self, num_pages: int) -> None:
        """Drop pins, least recently used first, until `num_pages` are evictable or none is left.
        Firm ones stay."""
        while self._cache.evictable_pages < num_pages and self.unpin_oldest():
            pass

    def unpin_oldest(self) -> bool:
        """Drop the least recently used pin that is not firm, for its memory. Returns whether there
        was one."""
        if not self._pinned:
            return False
        self._lose(next(iter(self._pinned)), "its memory was needed")
        return True

    def lose_all(self, why: str) -> None:
        for pin in (*self._pinned, *self._firm):
            self._lose(pin, why)

    def forget_all(self, why: str) -> None:
        """The cache has been dropped as a whole: there is nothing to unpin."""
        for pin in (*self._pinned, *self._firm):
            self._note_lost(pin, why)
        self._pinned.clear()
        self._firm.clear()

    def take_lost(self) -> list[LostPin]:
        """The pins of `keep` that had to go since the last call."""
        lost = self._lost
        self._lost = []
        return lost

    def _lose(self, pin: Pin, why: str) -> None:
        self._note_lost(pin, why)
        self.drop(pin)

    def _note_lost(self, pin: Pin, why: str) -> None:
        pin.why_lost = why
        if pin.is_told:
            self._lost.append(LostPin(pin.name, pin.num_tokens, why))

    def _pin(self, name: str, key: CacheKey, *, is_told: bool) -> Pin:
        found = self._cache.match(key)
        pin = Pin(self, name, found.handle, found.length, is_told=is_told)
        if found.length:
            self._cache.pin(found.handle)
            self._pinned[pin] = None
        return pin

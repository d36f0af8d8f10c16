"""Pins: paths of the prefix cache that are kept for an owner without a request.

There are two kinds. A session pins the KV of its last turn: when memory is needed, the least
recently used of these pins is removed first, before a request is refused (`KvMemory` counts their
pages as available). A *firm* pin is a lock, so that its pages are not available: it becomes a pin
of the first kind only if a request could otherwise not run at all. Pins know names and keys, but
not the owners of the names.

    keep_firm ─▶ firm ── give_way ─▶ pinned ── its memory is needed ─▶ lost
                  ▲                    │
                  └────── harden ──────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from weft.memory.prefix_cache import CacheKey, Handle
from weft.memory.radix.cache import RadixCache


class LostPin(NamedTuple):
    """A pin that was removed for its memory."""

    name: str
    num_tokens: int
    why: str


class Pin:
    """One path, of whole pages. `drop` releases it; after it was lost, `drop` does nothing."""

    def __init__(
        self, pins: Pins, name: str, handle: Handle, num_tokens: int, *, reports_loss: bool
    ) -> None:
        self._pins = pins
        self.name = name
        self.handle = handle
        self.num_tokens = num_tokens
        self.reports_loss = reports_loss  # whether `take_lost` reports its loss
        self.why_lost = ""  # empty while it is not lost

    def touch(self) -> None:
        """Mark the pin as used now: others are removed first."""
        self._pins.touch(self)

    def drop(self) -> None:
        self._pins.drop(self)


class Pins:
    """The pins on one cache, in the order of their last use."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._pinned: OrderedDict[Pin, None] = OrderedDict()  # least recently used first
        self._firm: OrderedDict[Pin, None] = OrderedDict()  # least recently used first
        self._lost: list[LostPin] = []
        self.num_given_way = 0  # firm pins that became soft, since the start

    def __iter__(self) -> Iterator[Pin]:
        """The pins that are not firm, least recently used first."""
        return iter(self._pinned)

    @property
    def firm(self) -> Iterator[Pin]:
        """The firm pins, least recently used first."""
        return iter(self._firm)

    def is_firm(self, pin: Pin) -> bool:
        return pin in self._firm

    def keep(self, name: str, key: CacheKey) -> Pin:
        """Pin the cached part of a sequence."""
        return self._pin(name, key, reports_loss=True)

    def keep_softly(self, name: str, key: CacheKey) -> Pin:
        """The same, for an owner who reads `Pin.why_lost`."""
        return self._pin(name, key, reports_loss=False)

    def keep_firm(self, name: str, key: CacheKey) -> Pin:
        """Pin the cached part of a sequence firmly, so that its memory is not available. The owner
        reads `Pin.why_lost`."""
        found = self._cache.match(key)
        pin = Pin(self, name, found.handle, found.length, reports_loss=False)
        if found.length:
            self._cache.lock(found.handle)
            self._firm[pin] = None
        return pin

    def harden(self, pin: Pin) -> None:
        """Make a pin firm again. Does nothing for a lost one."""
        if pin in self._pinned:
            # Lock first, so that its pages never become evictable in between.
            self._cache.lock(pin.handle)
            self._cache.unpin(pin.handle)
            del self._pinned[pin]
            self._firm[pin] = None

    def give_way(self) -> bool:
        """Make the least recently used firm pin soft, so that its memory can be taken. Returns
        whether there was one."""
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
        """Drop soft pins, least recently used first, until `num_pages` are evictable or no soft pin
        is left."""
        while self._cache.evictable_pages < num_pages and self.unpin_oldest():
            pass

    def unpin_oldest(self) -> bool:
        """Drop the least recently used soft pin, for its memory. Returns whether there was one."""
        if not self._pinned:
            return False
        self._lose(next(iter(self._pinned)), "its memory was needed")
        return True

    def lose_all(self, why: str) -> None:
        for pin in (*self._pinned, *self._firm):
            self._lose(pin, why)

    def forget_all(self, why: str) -> None:
        """The whole cache has been dropped, so there is nothing to unpin."""
        for pin in (*self._pinned, *self._firm):
            self._note_lost(pin, why)
        self._pinned.clear()
        self._firm.clear()

    def take_lost(self) -> list[LostPin]:
        """The pins of `keep` that were removed since the last call."""
        lost = self._lost
        self._lost = []
        return lost

    def _lose(self, pin: Pin, why: str) -> None:
        self._note_lost(pin, why)
        self.drop(pin)

    def _note_lost(self, pin: Pin, why: str) -> None:
        pin.why_lost = why
        if pin.reports_loss:
            self._lost.append(LostPin(pin.name, pin.num_tokens, why))

    def _pin(self, name: str, key: CacheKey, *, reports_loss: bool) -> Pin:
        found = self._cache.match(key)
        pin = Pin(self, name, found.handle, found.length, reports_loss=reports_loss)
        if found.length:
            self._cache.pin(found.handle)
            self._pinned[pin] = None
        return pin

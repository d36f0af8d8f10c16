"""Publishes the changes of the prefix cache after each step. Attached if changes are published."""

from __future__ import annotations

from weft.engine.hooks import Service
from weft.memory.events.protocol import CacheEvents
from weft.memory.radix.cache import RadixCache


class CacheEventService(Service):
    """All changes of the cache are made in a step, or are followed by one."""

    name = "the events of the cache"

    def __init__(self, cache: RadixCache, events: CacheEvents) -> None:
        self._events = events
        events.emptied()  # there may have been another cache before this one
        cache.tree.listeners.append(events)

    def after_step(self, now: float) -> None:
        self._events.publish()

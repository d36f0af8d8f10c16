"""Tells those who follow the prefix cache when a step has ended. Attached where there are such."""

from __future__ import annotations

from weft.engine.hooks import Service
from weft.memory.events.protocol import CacheEvents
from weft.memory.prefix_cache import PrefixCache


class CacheEventService(Service):
    """What changes the cache is part of a step, or a step follows it."""

    name = "the events of the cache"

    def __init__(self, cache: PrefixCache, events: CacheEvents) -> None:
        self._events = events
        events.emptied()  # there may have been another cache before this one
        cache.listeners.append(events)

    def after_step(self, now: float) -> None:
        self._events.publish()

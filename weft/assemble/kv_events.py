"""Starts the publisher of changes of the prefix cache, if the settings ask for it."""

from __future__ import annotations

from weft.config.engine import EngineConfig
from weft.config.kv_events import parse_kv_events
from weft.memory.events.protocol import CacheEvents, NoCacheEvents


def make_cache_events(config: EngineConfig) -> CacheEvents:
    """The publisher, started, or `NoCacheEvents`. `config` is resolved. Raises SettingsError if the
    publisher cannot listen."""
    settings = parse_kv_events(config.kv_events_config)
    if not settings.is_on:
        return NoCacheEvents()
    from weft.kv_events.publisher import KvEventPublisher

    publisher = KvEventPublisher(settings, config.page_size)
    publisher.start()
    return publisher

"""Handlers of control requests about the cache in memory and on disk."""

from __future__ import annotations

from weft.engine.services import Services
from weft.memory.prefix_cache import CacheKey
from weft.messages.cache import (
    ClearCache,
    ClearCacheReply,
    ForgetPrefix,
    ForgetPrefixReply,
    GetCache,
    GetCacheReply,
    SaveCache,
    SaveCacheReply,
)
from weft.messages.picture import GetPrefix, GetPrefixReply
from weft.messages.pins import Unpin, UnpinReply
from weft.scheduler.request import namespace_of

NO_STORE = "this server was started without --cache-dir"


def get_cache(services: Services, message: GetCache) -> GetCacheReply:
    scheduler = services.scheduler
    cache = scheduler.kv.cache
    num_pages = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
    counters = scheduler.counters
    reply = GetCacheReply(
        kv_tokens=scheduler.kv.room.capacity,
        cached_tokens=num_pages * scheduler.settings.page_size,
        prompt_tokens=counters.num_prompt_tokens,
        memory_hit_tokens=counters.num_cached_tokens,
        disk_hit_tokens=0,
        disk=NO_STORE,
    )
    reply = services.pins.add_to(reply, services.clock())
    if services.tiers is None:
        return reply
    return services.tiers.add_to(reply)


def unpin(services: Services, message: Unpin) -> UnpinReply:
    num_tokens = services.pins.unpin(message.name)
    if not num_tokens:
        return UnpinReply(success=False, message=f"there is no pin {message.name!r}")
    return UnpinReply(success=True, tokens=num_tokens)


def get_prefix(services: Services, message: GetPrefix) -> GetPrefixReply:
    return services.observers.pictures.prefix(message.node)


def forget_prefix(services: Services, message: ForgetPrefix) -> ForgetPrefixReply:
    kv = services.scheduler.kv
    key = CacheKey(namespace_of(message.adapter, message.cache_salt), message.tokens)
    num_tokens = kv.forget_prefix(key, max(message.keep, 0))
    stored = "" if services.tiers is None else services.tiers.left_by_flush()
    return ForgetPrefixReply(tokens=num_tokens, left=kv.cache.peek(key), stored=stored)


def clear_cache(services: Services, message: ClearCache) -> ClearCacheReply:
    if services.tiers is None:
        return ClearCacheReply(success=False, message=NO_STORE)
    return ClearCacheReply(success=True, dropped_blocks=services.tiers.clear())


def save_cache(services: Services, message: SaveCache) -> SaveCacheReply | None:
    """Answered when everything is written, or at the time limit."""
    if services.tiers is None:
        return SaveCacheReply(success=False, message=NO_STORE)
    services.tiers.save(message.call, services.clock() + message.timeout_s)
    return None

"""Control requests about the cache: what is in memory, and what is stored in the folder of
`--cache-dir`."""

from __future__ import annotations

from weft.messages.calls import ControlReply, ControlRequest, SuccessReply
from weft.messages.pins import PinStatus


class GetCacheReply(ControlReply):
    kv_tokens: int  # size of the pool in memory
    cached_tokens: int  # that the prefix cache has there, used or not
    prompt_tokens: int  # of all requests so far,
    memory_hit_tokens: int  # those of them that were in memory,
    disk_hit_tokens: int  # and those that were read for it
    disk: str  # "open", or why nothing is read and written
    folder: str = ""
    disk_blocks: int = 0  # that may be found
    disk_bytes: int = 0  # of all files, also those of other models
    max_bytes: int = 0
    read_bytes: int = 0  # since the start
    written_bytes: int = 0
    dropped_blocks: int = 0  # for lack of room
    faults: int = 0  # blocks that could not be read or written, or were damaged
    reading: int = 0  # transfers that are under way
    writing: int = 0
    waiting_requests: int = 0  # for what is being read
    # In the memory of the host, where the pool lies in that of a GPU.
    host: str = "this server was started without --cache-host-gb"
    host_hit_tokens: int = 0
    host_blocks: int = 0
    host_bytes: int = 0
    max_host_bytes: int = 0
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    host_dropped_blocks: int = 0  # for lack of room
    pinned_tokens: int = 0  # in memory, by the pins below
    max_pinned_tokens: int = 0  # that may be
    pins: list[PinStatus] = []  # the least recently used first


class GetCache(ControlRequest[GetCacheReply]):
    """Ask what of prompts is cached, in memory and on disk."""


class ForgetPrefixReply(ControlReply):
    tokens: int = 0  # that are not cached any more
    left: int = 0  # of the prefix, that still are: they are in use, or lead to something else
    stored: str = ""  # what is found again in a store, for people


class ForgetPrefix(ControlRequest[ForgetPrefixReply]):
    """Drop from memory all that is cached behind a prefix, and of the prefix what leads to nothing
    else. What requests, pins or sessions use stays."""

    tokens: bytes  # int32, of the whole prefix, as requests with this salt and adapter have it
    cache_salt: str = ""
    adapter: str = ""  # its uid
    keep: int = 0  # tokens at its beginning that stay in any case


class ClearCacheReply(SuccessReply):
    dropped_blocks: int = 0


class ClearCache(ControlRequest[ClearCacheReply]):
    """Remove all files of cached KV. What is in memory stays there (`FlushCache`)."""


class SaveCacheReply(SuccessReply):
    written_bytes: int = 0


class SaveCache(ControlRequest[SaveCacheReply]):
    """Write all that the prefix cache has, the last used first, for up to `timeout_s`."""

    timeout_s: float = 0.0

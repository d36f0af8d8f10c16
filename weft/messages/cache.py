"""Control requests about the caches of KV: in memory, and in the folder of `--cache-dir`."""

from __future__ import annotations

from weft.messages.calls import ControlReply, ControlRequest, SuccessReply
from weft.messages.pins import PinStatus


class GetCacheReply(ControlReply):
    kv_tokens: int  # size of the KV pool, in tokens
    cached_tokens: int  # tokens of the pool in the prefix cache, in use or not
    prompt_tokens: int  # prompt tokens of all requests so far
    memory_hit_tokens: int  # of these, the tokens that were found in the pool
    disk_hit_tokens: int  # of these, the tokens that were read from the folder
    disk: str  # "open", or the reason why the folder is not used
    folder: str = ""
    disk_blocks: int = 0  # stored blocks that this engine can use
    disk_bytes: int = 0  # size of all files, including those of other models
    max_bytes: int = 0
    read_bytes: int = 0  # since the start
    written_bytes: int = 0
    dropped_blocks: int = 0  # for lack of room
    faults: int = 0  # blocks that could not be read or written, or were damaged
    reading: int = 0  # current transfers
    writing: int = 0
    waiting_requests: int = 0  # requests that wait for a read
    # The tier in the memory of the host, if the pool is in the memory of a GPU.
    host: str = "this server was started without --cache-host-gb"
    host_hit_tokens: int = 0
    host_blocks: int = 0
    host_bytes: int = 0
    max_host_bytes: int = 0
    host_read_bytes: int = 0
    host_written_bytes: int = 0
    host_dropped_blocks: int = 0  # for lack of room
    pinned_tokens: int = 0  # tokens in the pool that `pins` keep there
    max_pinned_tokens: int = 0  # limit of pinned tokens
    pins: list[PinStatus] = []  # the least recently used first


class GetCache(ControlRequest[GetCacheReply]):
    """Ask for the state of the caches of prompts, in memory and on disk."""


class ForgetPrefixReply(ControlReply):
    tokens: int = 0  # tokens that were dropped from memory
    left: int = 0  # tokens of the prefix that stay: they are in use, or other prompts share them
    stored: str = ""  # for users: the data that a store still has


class ForgetPrefix(ControlRequest[ForgetPrefixReply]):
    """Drop from memory everything that is cached after a prefix, and the part of the prefix that no
    other prompt shares. KV that requests, pins or sessions use stays."""

    tokens: bytes  # int32: the whole prefix, of requests with this salt and adapter
    cache_salt: str = ""
    adapter: str = ""  # uid of the adapter
    keep: int = 0  # tokens at the beginning of the prefix that stay in any case


class ClearCacheReply(SuccessReply):
    dropped_blocks: int = 0  # in files


class ClearCache(ControlRequest[ClearCacheReply]):
    """Remove all files of cached KV, and copies in the host's memory. The cache in the pool stays
    (see `FlushCache`)."""


class SaveCacheReply(SuccessReply):
    written_bytes: int = 0


class SaveCache(ControlRequest[SaveCacheReply]):
    """Write the whole prefix cache to files, the last used first, for up to `timeout_s`."""

    timeout_s: float = 0.0

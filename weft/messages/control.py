"""Control requests, each beside its reply, and what the engine tells of itself unasked.

`call` is the sender's number for the call; its reply carries the same.
"""

from __future__ import annotations

import msgspec


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="flush_cache"):
    """Empty the prefix cache. Only an idle engine can: else wait up to `timeout_s` for it to become idle."""

    call: int
    timeout_s: float = 0.0


class FlushCacheReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="flush_cache_reply"):
    call: int
    success: bool
    message: str = ""


class GetState(msgspec.Struct, frozen=True, kw_only=True, tag="get_state"):
    """Ask for the engine's state as it is now. Answered at once, also while work is queued."""

    call: int


class GetStateReply(msgspec.Struct, frozen=True, kw_only=True, tag="get_state_reply"):
    call: int
    stats: Stats


class FreezeGC(msgspec.Struct, frozen=True, kw_only=True, tag="freeze_gc"):
    """Move every live object out of the garbage collector's sight."""

    call: int


class FreezeGCReply(msgspec.Struct, frozen=True, kw_only=True, tag="freeze_gc_reply"):
    call: int
    frozen_objects: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Finish what is open for up to `drain_s`, abort the rest, and end the engine process."""

    drain_s: float = 0.0


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """State of the engine: gauges, and counters (`total_*`) since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_tokens: int = 0  # size of the KV pool
    kv_used: int = 0  # held by requests, or locked by them in the prefix cache
    kv_evictable: int = 0  # cached and free to evict
    new_token_ratio: float = 0.0
    batch_is_full: bool = False
    total_steps: int = 0
    total_prefill_steps: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_prefilled_tokens: int = 0
    total_generated_tokens: int = 0
    total_retractions: int = 0
    total_evicted_tokens: int = 0
    total_requests: int = 0
    total_aborted: int = 0
    total_dropped_messages: int = 0
    busy_s: float = 0.0  # time with work


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine has generated a token on the path it will serve with."""

    model_summary: str  # "Qwen3-0.6B (0.6 B, bfloat16)"
    vocab_size: int
    context_length: int  # prompt and completion together
    max_prompt_tokens: int
    kv_tokens: int
    page_size: int
    startup: list[tuple[str, str, float]]  # phase, what it did, seconds


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or stops: the reason in one paragraph."""

    message: str
    user_error: bool = False  # the user can mend it: exit status 2, no traceback

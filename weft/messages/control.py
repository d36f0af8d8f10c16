"""Control requests, each beside its reply, and what the engine tells of itself unasked.

`call` is the sender's number for the call; its reply carries the same.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="flush_cache"):
    """Empty the prefix cache. Only an idle engine can: else wait up to `timeout_s` for it to become idle."""

    call: int
    timeout_s: float = 0.0


class FlushCacheReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="flush_cache_reply"
):
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


class ListRequests(msgspec.Struct, frozen=True, kw_only=True, tag="list_requests"):
    """Ask which requests are open."""

    call: int
    limit: int = 1_000  # of the rows that are told


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One open request."""

    id: int
    rid: str
    state: str  # waiting, prefilling, decoding
    position: int | None  # in the queue, 0 is next; None if it does not wait
    age_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompt, found when it was first admitted
    session: str = ""  # to which it belongs
    priority: int = 0
    tenant: str = ""
    user: str = ""
    timeout_s: float | None = None  # until its deadline; None if it has none
    retractions: int = 0
    why: str = ""  # it waits, or its open prompt does not go on


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    waiting_queue_size: int
    running_batch_size: int  # requests that decode
    prefilling: int  # requests whose prompt is being computed, or has just been
    max_queued_requests: int
    max_running_requests: int
    batch_is_full: bool
    chunked_rid: str | None  # the request whose prompt is partly computed
    free_tokens: int  # of KV memory: free, or cached and evictable
    grammar_queue_size: int = 0
    sessions: int = 0
    queued_tokens: int = 0  # prompt tokens of waiting requests that never ran
    max_queued_tokens: int = 0  # 0: no limit
    input_state: str = "unblocked"  # or blocked, global_unblock_barrier
    held_requests: int = 0  # waiting ones that came since the input was blocked
    paused: str = ""  # how generation was paused, if it is


class ListRequestsReply(msgspec.Struct, frozen=True, kw_only=True, tag="list_requests_reply"):
    call: int
    queue: QueueStatus
    requests: list[RequestRow]  # those with a row first, then the queue in order


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, tag="explain_request"):
    """Ask what happened to the requests with exactly this name: open ones, and the latest that have ended."""

    call: int
    rid: str


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided about a request, or why it was not admitted, in one or more successive steps."""

    at_s: float  # since its arrival
    first_step: int
    last_step: int
    times: int
    what: str

    def __str__(self) -> str:
        steps = (
            f"step {self.first_step}"
            if self.first_step == self.last_step
            else f"step {self.first_step}-{self.last_step}"
        )
        times = f", {self.times} times" if self.times > 1 else ""
        return f"{self.at_s:9.3f} s  {steps}{times}: {self.what}"


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request spent in each stage, in seconds; None for a stage that it has not come to."""

    queued_s: float  # until it was first admitted
    prefill_s: float | None  # until its first token
    decode_s: float | None
    total_s: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is remembered of one request."""

    id: int
    rid: str
    state: str  # waiting, prefilling, decoding, finished
    position: int | None  # in the queue, 0 is next
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stages: StageTimes
    retractions: int
    recomputed_tokens: int  # computed again after retractions
    refound_tokens: int  # not computed again, because they were still in the cache
    why: str = ""  # it waits now, if it does
    timeline: list[TimelineEntry]  # where something is left out, an entry says so


class ExplainRequestReply(msgspec.Struct, frozen=True, kw_only=True, tag="explain_request_reply"):
    call: int
    found: list[Explanation]  # the newest first


class SetPolicy(msgspec.Struct, frozen=True, kw_only=True, tag="set_policy"):
    """Order the waiting requests by another policy from now on."""

    call: int
    policy: str


class SetPolicyReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="set_policy_reply"
):
    call: int
    success: bool
    before: str  # the policy until now
    message: str = ""


class AuditBooks(msgspec.Struct, frozen=True, kw_only=True, tag="audit"):
    """Check who owns each page of KV memory, now."""

    call: int


class AuditReply(msgspec.Struct, frozen=True, kw_only=True, tag="audit_reply"):
    call: int
    faults: list[str]  # found now; their pages are out of circulation
    num_pages: int
    free: int
    cached: int  # by the prefix cache, locked or not
    held: int  # by requests, besides those
    rows: int  # of the row table, taken by requests
    quarantined: int  # out of circulation since a fault
    total_faults: int  # since the start


class SlowDown(msgspec.Struct, frozen=True, kw_only=True, tag="slow_down"):
    """Let every step of the engine take at least so long, from now on. None: as fast as it can."""

    call: int
    step_s: float | None


class SlowDownReply(msgspec.Struct, frozen=True, kw_only=True, tag="slow_down_reply"):
    call: int
    before_s: float | None  # how long it was until now


class StartProfile(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="start_profile"
):
    """Record what the device does in the next steps."""

    call: int
    num_steps: int | None = (
        None  # then it stops by itself; None: when it is told to, or at the profiler's own limit
    )
    activities: list[str] = []  # CPU, GPU; none: all that the device has
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    folder: str = ""  # for the trace, below the one that the engine was given
    prefix: str = ""  # of the trace's name


class StartProfileReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="start_profile_reply"
):
    call: int
    success: bool
    is_preparing: bool = False  # nothing is recorded yet: ask again
    trace: str = ""  # where it will lie, below the profiler's folder; nothing if none is written
    message: str = ""


class StopProfile(msgspec.Struct, frozen=True, kw_only=True, tag="stop_profile"):
    """Stop recording, if it has not stopped by itself, and ask for the report. Ask again while it is being written."""

    call: int


class StopProfileReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stop_profile_reply"
):
    call: int
    state: Literal["none", "writing", "done", "failed"]
    num_steps: int = 0  # that were recorded
    trace: str = ""  # below the profiler's folder
    table: str = ""  # the operations that took most, as text
    message: str = ""


Setting: TypeAlias = bool | int | float | str | None


class GetInternalState(msgspec.Struct, frozen=True, kw_only=True, tag="get_internal_state"):
    """Ask for the settings that can change while the engine runs, and for what else is in force now."""

    call: int


class GetInternalStateReply(
    msgspec.Struct, frozen=True, kw_only=True, tag="get_internal_state_reply"
):
    call: int
    settings: dict[str, Setting]  # that `SetInternalState` takes, with their values
    state: dict[str, Setting]  # what follows from them and from other control requests
    stats: Stats


class SetInternalState(msgspec.Struct, frozen=True, kw_only=True, tag="set_internal_state"):
    """Change settings while the engine runs: all of these, or none if one of them cannot be."""

    call: int
    settings: dict[str, Setting]


class SetInternalStateReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="set_internal_state_reply"
):
    call: int
    success: bool
    before: dict[str, Setting] = {}  # values until now of those that were changed
    name: str = ""  # the setting that is to blame
    message: str = ""


class ConfigureLogging(msgspec.Struct, frozen=True, kw_only=True, tag="configure_logging"):
    """Log from this level up: debug, info, warning, error."""

    call: int
    log_level: str


class ConfigureLoggingReply(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="configure_logging_reply"
):
    call: int
    success: bool
    before: str  # the level until now
    message: str = ""


class CallFailed(msgspec.Struct, frozen=True, kw_only=True, tag="call_failed"):
    """Answers any control request that could not be carried out because the engine failed on it."""

    call: int
    message: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Finish what is open for up to `drain_s`, abort the rest, and end the engine process."""

    drain_s: float = 0.0


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """State of the engine: gauges, and counters (`total_*`) since its start."""

    num_running: int = 0
    max_running_requests: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of those that never ran
    num_grammar_queue: int = 0  # of the waiting ones, those whose grammar is being compiled
    kv_tokens: int = 0  # size of the KV pool
    kv_used: int = 0  # held by requests, or locked by them in the prefix cache
    kv_evictable: int = 0  # cached and free to evict
    kv_held: int = 0  # cached, kept for sessions until memory is needed
    num_sessions: int = 0  # that are open
    kv_quarantined: int = 0  # out of circulation, because their owner was not clear
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
    total_queue_full: int = 0  # requests refused because the queue was full
    total_dropped_messages: int = 0  # that could not be read
    total_unknown_messages: int = 0  # that nobody handles
    total_failed_messages: int = 0  # whose handling raised
    total_duplicate_requests: int = 0  # with the number of an open one
    total_grammars: int = 0  # that requests have asked for
    total_grammar_hits: int = 0  # of these, found in the cache
    total_grammar_refused: int = 0  # and invalid, or too much to compile
    total_forced_tokens: int = 0  # of the generated ones, those that a grammar left no choice about
    total_faults: int = 0  # found in the books of KV memory
    busy_s: float = 0.0  # time with work


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The engine's process lives. Sent by a thread of its own, twice a second, also while a step runs."""

    step_s: float  # for how long the present step has run; 0 between steps
    idle_s: float  # for how long the process has used (nearly) no processor time


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """What a model makes of prompts that generates nothing."""

    task: str  # embed or classify
    size: int  # numbers of a vector, or labels
    labels: list[str] = []
    num_token_types: int = 0  # kinds of segments that it tells apart


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine has generated a token on the path it will serve with."""

    model_summary: str  # "Qwen3-0.6B (0.6 B, bfloat16)"
    vocab_size: int
    context_length: int  # prompt and completion together
    max_prompt_tokens: int
    kv_tokens: int
    page_size: int
    max_running_requests: int = 0  # rows; 0: not told
    startup: list[tuple[str, str, float]]  # phase, what it did, seconds
    pools: Pools | None = None  # None: it generates
    hidden_size: int = 0  # of hidden states and of input embeddings; 0: it takes and gives none
    gives_hidden_states: bool = False  # to those who ask
    dtype: str = "float32"  # in which the model computes: input embeddings become that


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or stops: the reason in one paragraph."""

    message: str
    user_error: bool = False  # the user can mend it: exit status 2, no traceback

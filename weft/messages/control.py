"""Control requests about work and settings, each followed by its reply. The requests about weights
and sessions are in `weights.py` and `sessions.py`.

Where an HTTP route does what a request does, the body of the route is the request: the names of its
fields are those that clients know (SGLang's, where SGLang has the request too).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.messages.calls import ControlReply, ControlRequest, SuccessReply
from weft.messages.status import Stats

PauseMode = Literal["abort", "retract", "in_place"]
Setting: TypeAlias = bool | int | float | str | None


# ---- cache, collector, books


class FlushCacheReply(SuccessReply):
    pass


class FlushCache(ControlRequest[FlushCacheReply]):
    """Empty the prefix cache. Only an idle engine can: wait up to `timeout_s` for that."""

    timeout_s: float = 0.0


class FreezeGCReply(ControlReply):
    frozen_objects: int


class FreezeGC(ControlRequest[FreezeGCReply]):
    """Move every live object out of the garbage collector's sight."""


class AuditReply(ControlReply):
    faults: list[str]  # found now; their pages are out of circulation
    num_pages: int
    free: int
    cached: int  # by the prefix cache, locked or not
    held: int  # by requests, besides those
    rows: int  # of the row table, taken by requests
    quarantined: int  # out of circulation since a fault
    total_faults: int  # since the start


class AuditKv(ControlRequest[AuditReply], tag="audit"):
    """Check who owns each page of KV memory, now."""


# ---- state


class GetStateReply(ControlReply):
    stats: Stats


class GetState(ControlRequest[GetStateReply]):
    """Ask for the engine's numbers. Answered at once, also while work is queued."""


class HealthCheckReply(SuccessReply):
    pass


class HealthCheck(ControlRequest[HealthCheckReply]):
    """Ask whether the engine computes. The request never queues.

    The next result of a step answers it; an engine in which nothing runs generates a token for it.
    While generation is paused it is answered at once.
    """


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One open request."""

    id: int
    rid: str
    state: str  # waiting, prefilling, decoding
    position: int | None  # in the queue, 0 is next; None if it does not wait
    age_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompt, found when the request was first admitted
    session: str = ""  # to which the request belongs
    priority: int = 0
    tenant: str = ""
    user: str = ""
    timeout_s: float | None = None  # until its deadline; None if it has none
    retractions: int = 0
    why: str = ""  # the reason why it waits, or why its open prompt does not go on
    shadow: str = ""  # what the shadow policy would have changed for it
    dp_rank: int = 0  # the engine that has it; the front says so


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
    input_state: str = "unblocked"  # or blocked
    held_requests: int = 0  # waiting requests that came since the input was blocked
    paused: str = ""  # the way in which generation is paused, if it is
    policy: str = ""
    policy_fault: str = ""  # of a policy of one's own: why requests go as they came
    shadow_policy: str = ""
    shadow_fault: str = ""


class ListRequestsReply(ControlReply):
    queue: QueueStatus
    requests: list[RequestRow]  # those with a row first, then the queue in order


class ListRequests(ControlRequest[ListRequestsReply]):
    """Ask which requests are open, and for the queue in numbers."""

    limit: int = 1_000  # of the rows in the reply


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about a request, or a reason against it, in one or more successive steps."""

    at_s: float  # since its arrival
    first_step: int
    last_step: int
    times: int
    what: str

    def __str__(self) -> str:
        steps = f"step {self.first_step}"
        if self.last_step != self.first_step:
            steps += f"-{self.last_step}"
        if self.times > 1:
            steps += f", {self.times} times"
        return f"{self.at_s:9.3f} s  {steps}: {self.what}"


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a request spent in each stage; None for a stage that it has not come to."""

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
    why: str = ""  # the reason why it waits now, if it does
    drafts: str = ""  # what became of guesses of its tokens, and why the last step had none
    shadow: str = ""  # what the shadow policy would have changed for it
    # Of one that waits, from now on: nine of ten times lie between the outer two.
    first_token_in_s: tuple[float, float, float] | None = None
    timeline: list[TimelineEntry]  # where something is left out, an entry says so
    dp_rank: int = 0  # the engine that has it, or had it; the front says so


class ExplainRequestReply(ControlReply):
    found: list[Explanation]  # the newest first


class ExplainRequest(ControlRequest[ExplainRequestReply]):
    """Ask what happened to the requests of exactly this name.

    The engine remembers open requests and the latest that have ended.
    """

    rid: str


class LogRequestTimesReply(ControlReply):
    num_requests: int  # that were written to the log


class LogRequestTimes(ControlRequest[LogRequestTimesReply], tag="log_request_processing_time"):
    """Write the times of the requests of exactly this name to the log, by stage."""

    rid: str


class ListMethodsReply(ControlReply):
    methods: dict[str, str]  # name: what it does


class ListMethods(ControlRequest[ListMethodsReply]):
    """Ask for the control requests that can be called by name."""


# ---- work


class AbortRequestReply(SuccessReply):
    aborted: int = 0  # requests that it has ended


class AbortRequest(ControlRequest[AbortRequestReply]):
    """End the requests of exactly this name, or of this group; or all of them."""

    rid: str | None = None
    abort_all: bool | None = None


class InputReply(ControlReply):
    state: str  # unblocked, blocked
    held_requests: int


class BlockInput(ControlRequest[InputReply], tag="block"):
    """Hold back requests that come from now on; those that came before go on.

    Blocking twice is blocking once.
    """


class UnblockInput(ControlRequest[InputReply], tag="unblock"):
    """Let requests in again, those that were held back first."""


class GenerationReply(ControlReply):
    paused: str  # the mode, or nothing
    num_requests: int  # that are open now


class PauseGeneration(ControlRequest[GenerationReply]):
    """Run no further step until `ContinueGeneration`. Requests that come meanwhile wait.

    The mode says what becomes of open requests: abort ends them, retract takes those that run back
    to the queue, so that they own no KV memory, in_place leaves them as they are.
    """

    mode: PauseMode = "abort"


class ContinueGeneration(ControlRequest[GenerationReply]):
    """Go on. Does nothing if generation is not paused."""


class SetPolicyReply(SuccessReply):
    before: str  # the policy until now


class SetPolicy(ControlRequest[SetPolicyReply]):
    """Order the waiting requests by another policy from now on."""

    policy: str


class SlowDownReply(ControlReply):
    before_s: float | None  # the pause until now


class SlowDown(ControlRequest[SlowDownReply]):
    """Let every step take at least `forward_sleep_time` seconds. None: as fast as it can."""

    forward_sleep_time: float | None


# ---- settings


class GetInternalStateReply(ControlReply):
    server_args: dict[str, Setting]  # that `SetInternalState` takes, with their values
    state: dict[str, Setting]  # that follows from them and from other control requests
    stats: Stats


class GetInternalState(ControlRequest[GetInternalStateReply]):
    """Ask for the settings that can change while the engine runs, and for its state."""


class SetInternalStateReply(SuccessReply):
    before: dict[str, Setting] = {}  # values until now of the settings that were changed
    name: str = ""  # the setting that is to blame


class SetInternalState(ControlRequest[SetInternalStateReply]):
    """Change settings while the engine runs: all of these, or none if one of them cannot be."""

    server_args: dict[str, Setting]


class ConfigureLoggingReply(SuccessReply):
    before: str  # the level until now


class ConfigureLogging(ControlRequest[ConfigureLoggingReply]):
    """Log from this level up: debug, info, warning, error."""

    log_level: str


# ---- the device's profiler


class StartProfileReply(SuccessReply):
    is_preparing: bool = False  # nothing is recorded yet: ask again
    trace: str = ""  # its path below the profiler's folder; nothing if none is written


class StartProfile(ControlRequest[StartProfileReply]):
    """Record what the device does in the next steps.

    Without `num_steps` recording ends with `StopProfile`, or at the profiler's own limit.
    """

    num_steps: int | None = None
    activities: list[str] | None = None  # CPU, GPU; None: all that the device has
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    output_dir: str | None = None  # for the trace, below --profile-dir
    profile_prefix: str | None = None  # of the trace's name


class ExpertRecordReply(SuccessReply):
    status: int = 200


class StartExpertDistributionRecord(ControlRequest[ExpertRecordReply]):
    """Count from the next step on which experts tokens get."""


class StopExpertDistributionRecord(ControlRequest[ExpertRecordReply]):
    """Count no more. What was counted can still be dumped."""


class ExpertDistributionReply(SuccessReply):
    layers: list[int] = []  # that have experts
    prefill: list[list[int]] = []  # by layer and expert, the tokens of prompts that it got,
    decode: list[list[int]] = []  # and the others
    file: str = ""  # below the profiler's folder; nothing if none is written
    is_recording: bool = False  # the counts grow with the steps to come
    status: int = 200


class GetExpertDistributionRecord(ControlRequest[ExpertDistributionReply]):
    """Ask for the counts since the start or the last dump. They stay, and no file is written."""


class DumpExpertDistributionRecord(ControlRequest[ExpertDistributionReply]):
    """Ask for the counts since the start or the last dump. Counting goes on from zero."""


class StopProfileReply(ControlReply):
    state: Literal["none", "writing", "done", "failed"]
    num_steps: int = 0  # that were recorded
    trace: str = ""  # below the profiler's folder
    table: str = ""  # the operations that took most, as text
    message: str = ""


class StopProfile(ControlRequest[StopProfileReply]):
    """Stop recording, if it has not stopped by itself, and ask for the report.

    Ask again while the report is being written.
    """

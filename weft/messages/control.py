"""Control requests about work and settings, each preceded by its reply. The requests about weights
and sessions are in `weights.py` and `sessions.py`.

If an HTTP route does the same as a request, the body of the route is the request: its fields have
the names that clients use (SGLang's, if SGLang has the request too).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weft.messages.calls import ControlReply, ControlRequest, SuccessReply
from weft.messages.status import Stats

PauseMode = Literal["abort", "retract", "in_place"]
Setting: TypeAlias = bool | int | float | str | None


# ---- cache, collector, accounting


class FlushCacheReply(SuccessReply):
    pass


class FlushCache(ControlRequest[FlushCacheReply]):
    """Empty the prefix cache. Only an idle engine can: wait up to `timeout_s` for that."""

    timeout_s: float = 0.0


class FreezeGCReply(ControlReply):
    frozen_objects: int


class FreezeGC(ControlRequest[FreezeGCReply]):
    """Exclude all living objects from garbage collection."""


class AuditReply(ControlReply):
    faults: list[str]  # faults found now; their pages are not used any more
    num_pages: int  # all pages; the next counts are pages, too
    free: int
    cached: int  # in the prefix cache, locked or not
    held: int  # owned by requests, not in the prefix cache
    rows: int  # rows of the row table that requests own
    quarantined: int  # pages that are not used any more since a fault
    total_faults: int  # since the start


class AuditKv(ControlRequest[AuditReply], tag="audit"):
    """Check the owner of each page of KV memory, now."""


# ---- state


class GetStateReply(ControlReply):
    stats: Stats


class GetState(ControlRequest[GetStateReply]):
    """Ask for the engine's numbers. Answered at once, also while work is queued."""


class HealthCheckReply(SuccessReply):
    pass


class HealthCheck(ControlRequest[HealthCheckReply]):
    """Ask whether the engine can compute. The request never waits in the queue.

    It is answered after the next step; an idle engine generates a token for it. While generation is
    paused, it is answered at once.
    """


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One open request."""

    id: int
    rid: str
    state: str  # waiting, grammar (it is being compiled), prefilling, decoding
    position: int | None  # in the queue, 0 is next; None if it does not wait
    age_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompt, found when the request was first admitted
    session: str = ""  # to which the request belongs
    priority: int = 0
    service: str = "online"  # class of service: online or background
    tenant: str = ""
    user: str = ""
    timeout_s: float | None = None  # until its deadline; None if it has none
    retractions: int = 0
    why: str = ""  # the reason why it waits, or why its partly computed prompt does not continue
    shadow: str = ""  # the change that the shadow policy would have made for it
    dp_rank: int = 0  # rank of its engine; the front sets it


# barrier: all engines will open or block their inputs at one moment. ramping: requests go on at a
# growing rate.
InputState = Literal["unblocked", "blocked", "barrier", "ramping"]


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
    input_state: InputState = "unblocked"
    ramp_left_s: float = 0.0  # seconds until the input is quite open; 0: no ramp
    background_waiting: int = 0  # of the waiting requests, those in the background
    background_running: int = 0  # of those with a row
    held_requests: int = 0  # waiting requests that came since the input was blocked
    paused: str = ""  # the mode in which generation is paused; "" if it is not
    policy: str = ""
    policy_fault: str = ""  # the error of a custom policy, after which requests run in FCFS order
    shadow_policy: str = ""
    shadow_fault: str = ""


class ListRequestsReply(ControlReply):
    queue: QueueStatus
    requests: list[RequestRow]  # requests with a row first, then the queue in order


class ListRequests(ControlRequest[ListRequestsReply]):
    """Ask for the open requests, and for the numbers of the queue."""

    limit: int = 1_000  # most requests in the reply


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about a request, or a reason against it, in one or more consecutive steps."""

    at_s: float  # since the arrival of the request
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
    """Seconds that a request spent in each stage; None for a stage that it has not reached."""

    queued_s: float  # until it was first admitted
    prefill_s: float | None  # until its first token
    decode_s: float | None
    total_s: float


class TimePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a request that were spent on one thing. `docs/guides/why-slow.md` has the
    names."""

    part: str
    seconds: float
    detail: str = ""  # behind whom, by which rule, for how many tokens


class LongestGap(msgspec.Struct, frozen=True, kw_only=True):
    """The longest time between two tokens of a request."""

    seconds: float
    at_s: float  # when it ended, since the arrival of the request
    step: int  # the longest step in it
    what: str  # what this step did, and for whom


class CacheCause(msgspec.Struct, frozen=True, kw_only=True):
    """Why not more of a prompt came from the cache."""

    cause: str  # one of the causes of docs/guides/observability.md
    rid: str  # the remembered request that begins most like it; empty: none
    same_tokens: int  # that both begin with
    # Where they part, this request has so many tokens instead of so many others.
    changed_tokens: int
    replaced_tokens: int
    missed_tokens: int  # would have been cached otherwise
    missed_s: float | None  # of its prefill, by the time of a token of it; None: it is not over
    # The first tokens from there on, of this prompt and of the other sequence, unless they are kept
    # from who asks.
    ours: list[int]
    theirs: list[int]
    words: str
    advice: str  # empty if there is none


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded history of one request."""

    id: int
    rid: str
    state: str  # waiting, grammar (it is being compiled), prefilling, decoding, finished
    position: int | None  # in the queue, 0 is next
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stages: StageTimes
    retractions: int
    recomputed_tokens: int  # tokens that were computed again after retractions
    refound_tokens: int  # tokens that were still in the cache after retractions
    why: str = ""  # the reason why it waits now, if it does
    drafts: str = ""  # the result of its draft tokens, and why the last step had none
    shadow: str = ""  # the change that the shadow policy would have made for it
    # Of a waiting request: the estimated time until its first token, from now on. The outer two
    # numbers are the limits of nine of ten cases. None while nothing is known, for example the end
    # of a pause.
    first_token_in_s: tuple[float, float, float] | None = None
    timeline: list[TimelineEntry]  # omitted entries are mentioned by an entry
    # All of its time in the engine so far; the parts add up to `stages.total_s`. With those of the
    # front, they add up to `total_s`.
    times: list[TimePart] = []
    longest_gap: LongestGap | None = None  # None before its second token
    # Its prompt as the prefix cache compares it, if it was asked for.
    namespace: str = ""
    prompt: bytes = b""
    # On the engine's clock; below 0: not yet.
    arrived_s: float = -1.0  # when the engine read it
    admitted_s: float = -1.0  # first
    explained_s: float = -1.0  # when this was made
    # The step that ended last before the engine read it: when it ended, on the same clock, and what
    # it did. Below 0: none.
    busy_until_s: float = -1.0
    busy_with: str = ""
    cache_cause: CacheCause | None = None  # only after admission; of the newest of a name
    row: int | None = None  # index of its row in the batch; None without one
    service: str = "online"  # class of service: online or background
    grammar: str = ""  # name of the grammar of an open request; equal grammars have equal names
    # Set by the front:
    dp_rank: int = 0  # rank of the engine that has, or had, the request
    total_s: float | None = None  # all of its time, with the front's; None: the front has none
    first_token_s: float | None = None  # from its arrival at the front to its first token there
    elsewhere: str = ""  # the server that had more of its prompt, in the words of `weft route`


class ExplainRequestReply(ControlReply):
    found: list[Explanation]  # the newest first


class ExplainRequest(ControlRequest[ExplainRequestReply]):
    """Ask for the history of all requests of exactly this name.

    The engine records open requests and the latest that have ended.
    """

    rid: str
    with_prompt: bool = False  # for questions to other engines: `FindPrefix`
    number: int = -1  # only of the one with this number, unless it is below 0
    # The tenant who asks: of requests of others it gets only lengths; empty: of all requests.
    # None: an administrator.
    viewer: str | None = None


class PrefixHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The remembered request of an engine that begins most like a prompt."""

    same_tokens: int
    usable_tokens: int  # of these, what the cache could give to a request for the prompt
    rid: str  # empty: it is not shown
    dp_rank: int = 0  # rank of the engine; the front sets it


class FindPrefixReply(ControlReply):
    found: list[PrefixHolder]


class FindPrefix(ControlRequest[FindPrefixReply]):
    """Ask for the remembered request that begins most like a prompt."""

    namespace: str
    prompt: bytes
    before_s: float  # of those that were admitted before this moment of the engine's clock
    viewer: str | None = None  # as in `ExplainRequest`


class LogRequestTimesReply(ControlReply):
    num_requests: int  # requests that were written to the log


class LogRequestTimes(ControlRequest[LogRequestTimesReply], tag="log_request_processing_time"):
    """Log the time of each stage of all requests of exactly this name."""

    rid: str


class ListMethodsReply(ControlReply):
    methods: dict[str, str]  # name -> description


class ListMethods(ControlRequest[ListMethodsReply]):
    """Ask for the control requests that can be called by name."""


# ---- work


class AbortRequestReply(SuccessReply):
    aborted: int = 0  # number of ended requests


class AbortRequest(ControlRequest[AbortRequestReply]):
    """End the requests of exactly this name, or of this group; or all of them."""

    rid: str | None = None
    abort_all: bool | None = None


class InputReply(ControlReply):
    state: InputState
    held_requests: int
    ramp_left_s: float = 0.0


class BlockInput(ControlRequest[InputReply], tag="block"):
    """Hold back requests that arrive from now on; earlier requests go on.

    Blocking a blocked engine has no effect.
    """

    at_s: float = 0.0  # moment of the engine's clock at which all engines do it; 0: at once
    # At the same step as the other engines that keep step with this one; then before `at_s`, or
    # not at all.
    together: bool = False


class UnblockInput(ControlRequest[InputReply], tag="unblock"):
    """Admit requests again, starting with the held-back ones; with `ramp_s`, at a rate that grows
    for so many seconds."""

    ramp_s: float = 0.0
    at_s: float = 0.0  # moment of the engine's clock at which all engines do it; 0: at once
    # At the same step as the other engines that keep step with this one; then before `at_s`, or
    # not at all.
    together: bool = False


class GenerationReply(ControlReply):
    paused: str  # the mode; "" if generation is not paused
    num_requests: int  # open requests


class PauseGeneration(ControlRequest[GenerationReply]):
    """Run no more steps until `ContinueGeneration`. Arriving requests wait.

    The mode decides about open requests: abort ends them; retract moves running requests back to
    the queue, so that they own no KV memory; in_place leaves them as they are.
    """

    mode: PauseMode = "abort"


class ContinueGeneration(ControlRequest[GenerationReply]):
    """Continue a paused generation. Does nothing if generation is not paused.

    With `ramp_s`, requests that wait are admitted at a rate that grows for so many seconds.
    """

    ramp_s: float = 0.0


class SetPolicyReply(SuccessReply):
    before: str  # the previous policy


class SetPolicy(ControlRequest[SetPolicyReply]):
    """Order the waiting requests by another policy from now on."""

    policy: str


class SlowDownReply(ControlReply):
    before_s: float | None  # the previous `forward_sleep_time`


class SlowDown(ControlRequest[SlowDownReply]):
    """Make every step take at least `forward_sleep_time` seconds; None: no limit."""

    forward_sleep_time: float | None


# ---- settings


class GetInternalStateReply(ControlReply):
    server_args: dict[str, Setting]  # the settings of `SetInternalState`, with their values
    state: dict[str, Setting]  # the state that results from these and other control requests
    stats: Stats


class GetInternalState(ControlRequest[GetInternalStateReply]):
    """Ask for the settings that can change while the engine runs, and for its state."""


class SetInternalStateReply(SuccessReply):
    before: dict[str, Setting] = {}  # previous values of the changed settings
    name: str = ""  # the setting that caused a failure


class SetInternalState(ControlRequest[SetInternalStateReply]):
    """Change settings while the engine runs: all of these, or none if one cannot be changed."""

    server_args: dict[str, Setting]


class ConfigureLoggingReply(SuccessReply):
    before: str  # the previous level


class ConfigureLogging(ControlRequest[ConfigureLoggingReply]):
    """Log messages of this level and above: debug, info, warning, error."""

    log_level: str


# ---- the device's profiler


class StartProfileReply(SuccessReply):
    is_preparing: bool = False  # nothing is recorded yet: ask again
    trace: str = ""  # path of the trace below the profiler's folder; "" if none is written


class StartProfile(ControlRequest[StartProfileReply]):
    """Record the work of the device in the next steps.

    Without `num_steps`, recording ends with `StopProfile`, or at the profiler's own limit.
    """

    num_steps: int | None = None
    activities: list[str] | None = None  # CPU, GPU; None: all activities of the device
    record_shapes: bool = False
    with_stack: bool = False
    profile_memory: bool = False
    output_dir: str | None = None  # for the trace, below --profile-dir
    profile_prefix: str | None = None  # of the trace's name


class ExpertRecordReply(SuccessReply):
    status: int = 200


class StartExpertDistributionRecord(ControlRequest[ExpertRecordReply]):
    """Count the tokens of each expert from the next step on."""


class StopExpertDistributionRecord(ControlRequest[ExpertRecordReply]):
    """Stop counting. The counts can still be dumped."""


class ExpertDistributionReply(SuccessReply):
    layers: list[int] = []  # layers with experts
    prefill: list[list[int]] = []  # [layers, experts] prompt tokens that each expert got
    decode: list[list[int]] = []  # [layers, experts] other tokens that each expert got
    file: str = ""  # path below the profiler's folder; "" if none is written
    is_recording: bool = False  # counting goes on
    status: int = 200


class GetExpertDistributionRecord(ControlRequest[ExpertDistributionReply]):
    """Ask for the counts since the start or the last dump. They stay, and no file is written."""


class DumpExpertDistributionRecord(ControlRequest[ExpertDistributionReply]):
    """Ask for the counts since the start or the last dump. Counting then continues from zero."""


class StopProfileReply(ControlReply):
    state: Literal["none", "writing", "done", "failed"]
    num_steps: int = 0  # recorded steps
    trace: str = ""  # path below the profiler's folder
    table: str = ""  # the operations that took the most time, as text
    message: str = ""


class StopProfile(ControlRequest[StopProfileReply]):
    """Stop recording, if it has not ended, and ask for the report.

    Ask again while the report is being written.
    """

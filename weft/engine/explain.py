"""Explains in words where requests are, what happened to them, and why, from the scheduler's
history.

It changes nothing. `explain` takes a few milliseconds with thousands of requests in memory; without
a call, nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator

import msgspec
import numpy as np

from weft.config.numbers import counted
from weft.engine.causes import cause_of, prompt_of
from weft.engine.times import longest_gap, step_in_words, time_parts
from weft.messages.control import (
    CacheCause,
    Explanation,
    QueueStatus,
    RequestRow,
    StageTimes,
    TimelineEntry,
)
from weft.observe.log import EventLog
from weft.scheduler.features.grammar import COMPILING
from weft.scheduler.groups.protocol import KV_MEMORY
from weft.scheduler.history import (
    MAX_EVENTS,
    PASSED_OVER,
    Event,
    EventKind,
    RequestDrafts,
    RequestTrace,
    SchedulingPass,
    Stop,
    Wait,
)
from weft.scheduler.policies.composed.shadowed import Shadowed
from weft.scheduler.request import NO_ROW, Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.times import NEVER

NUM_CAUSES = 8  # requests of one name whose cause is looked for
MAX_PASSES_SHOWN = 48  # of one request: the latest passes
NOT_LOOKED_AT = "no step has been planned since it arrived or was admitted to the queue"

log = EventLog("scheduler")


def get_queue_status(scheduler: Scheduler, num_sessions: int = 0) -> QueueStatus:
    """The queue and the batch in numbers."""
    queue = scheduler.waiting_queue
    chunked = scheduler.prefills.chunked_req
    num_decoding = len(scheduler.running_batch.rows)
    num_with_row = len(scheduler.requests) - len(queue)
    return QueueStatus(
        waiting_queue_size=len(queue),
        running_batch_size=num_decoding,
        prefilling=num_with_row - num_decoding,
        max_queued_requests=scheduler.settings.max_queued_requests,
        max_running_requests=scheduler.settings.max_running_requests,
        batch_is_full=scheduler.waiting_queue.online.is_full,
        chunked_rid=None if chunked is None else chunked.message.rid,
        free_tokens=scheduler.kv.room.available,
        sessions=num_sessions,
        queued_tokens=queue.num_tokens,
        max_queued_tokens=scheduler.settings.max_queued_tokens,
        background_waiting=queue.num_background,
        background_running=scheduler.kv.columns.num_background,
        held_requests=sum(1 for _ in queue.blocked()),
        policy=scheduler.settings.schedule_policy,
        policy_fault=scheduler.outbox.policy_fault,
        shadow_policy=scheduler.settings.shadow_policy,
        shadow_fault=scheduler.outbox.shadow_fault,
    )


def list_requests(
    scheduler: Scheduler,
    now: float,
    limit: int,
    *,
    session_of: Callable[[int], str] = lambda id: "",
    compiling: Container[int] = (),
) -> list[RequestRow]:
    """Open requests: those with a row by arrival, then the queue in its order.

    `session_of` gives the session of the request with an id; `compiling` has the ids of requests
    whose grammar is being compiled.
    """
    running = [request for request in scheduler.requests.values() if request.row != NO_ROW]
    running.sort(key=lambda request: request.spec.arrival_order)
    reasons = Reasons(scheduler, compiling)
    rows = [row_of(scheduler, one, None, now, reasons) for one in running[:limit]]
    for position, request in enumerate(list_waiting(scheduler, now)):
        if len(rows) == limit:
            break
        rows.append(row_of(scheduler, request, position, now, reasons))
    return [msgspec.structs.replace(row, session=session_of(row.id)) for row in rows]


def list_waiting(scheduler: Scheduler, now: float) -> Iterator[Request]:
    """The queue in its order; then the requests that the policy does not name."""
    seen: set[int] = set()
    for request in scheduler.waiting_queue.order(now):
        seen.add(request.id)
        yield request
    for request in scheduler.waiting_queue:
        if request.id not in seen:
            yield request


def trace_request_flow(
    scheduler: Scheduler,
    rid: str,
    now: float,
    *,
    number: int = -1,
    viewer: str | None = None,
    with_prompt: bool = False,
    compiling: Container[int] = (),
) -> list[Explanation]:
    """All open or remembered requests with exactly this name, newest first; with `number`, only the
    one with this number. `compiling` has the ids of requests whose grammar is being compiled.

    Only the newest have a `cache_cause`, because each is found by comparing the prompt with all
    that are remembered; only they have their prompts, `with_prompt`. `viewer`: the tenant who asks;
    None: an administrator, who sees all.
    """
    found = [trace for trace in scheduler.history.traces() if trace.rid == rid]
    if number >= 0:
        found = [trace for trace in found if trace.id == number]
    found.sort(key=lambda trace: -trace.arrival_order)
    explained: list[Explanation] = []
    for index, trace in enumerate(found):
        cause = cause_of(scheduler, trace, viewer) if index < NUM_CAUSES else None
        one = _explain(scheduler, trace, now, cause, compiling)
        if with_prompt and cause is not None:
            namespace, prompt = prompt_of(scheduler, trace)
            one = msgspec.structs.replace(one, namespace=namespace, prompt=prompt)
        explained.append(one)
    return explained


def explain(scheduler: Scheduler, id: int, now: float) -> Explanation | None:
    """The events of one request, and the reason of every pass in which it waited."""
    trace = scheduler.history.trace(id)
    if trace is None:
        return None
    return _explain(scheduler, trace, now, cause_of(scheduler, trace))


def stage_times(trace: RequestTrace, now: float) -> StageTimes:
    """The time of a request in each stage so far. A stage that has not begun is None."""
    finished_s = now if trace.finished_s == NEVER else trace.finished_s
    if trace.admitted_s == NEVER:
        waited_s = finished_s - trace.arrived_s
        return StageTimes(queued_s=waited_s, prefill_s=None, decode_s=None, total_s=waited_s)
    prefilled_s = finished_s
    decode_s = None
    if trace.first_token_s != NEVER:
        prefilled_s = trace.first_token_s
        decode_s = finished_s - prefilled_s
    return StageTimes(
        queued_s=trace.admitted_s - trace.arrived_s,
        prefill_s=prefilled_s - trace.admitted_s,
        decode_s=decode_s,
        total_s=finished_s - trace.arrived_s,
    )


def log_request_processing_time(scheduler: Scheduler, id: int, now: float) -> None:
    """Write the stages of a request to the log."""
    trace = scheduler.history.trace(id)
    if trace is None:
        return
    stages = stage_times(trace, now)
    log.info(
        "processing_time",
        rid=trace.rid,
        queued_s=stages.queued_s,
        prefill_s=stages.prefill_s,
        decode_s=stages.decode_s,
        total_s=stages.total_s,
    )


def row_of(
    scheduler: Scheduler,
    request: Request,
    position: int | None,
    now: float,
    reasons: Reasons,
) -> RequestRow:
    """An open request, without its session."""
    return RequestRow(
        id=request.id,
        rid=request.message.rid,
        state=_state(request, reasons.compiling),
        position=position,
        age_s=now - request.spec.arrival_s,
        prompt_tokens=request.spec.prompt_len,
        output_tokens=_num_output(scheduler, request),
        cached_tokens=request.cached_tokens,
        priority=request.message.priority,
        service=request.spec.service.name,
        tenant=request.message.tenant,
        user=request.message.user,
        timeout_s=_time_left(scheduler, request, now),
        retractions=request.retractions,
        why=reasons.of(request),
        shadow=shadow_words(scheduler, request.id),
    )


def _state(request: Request, compiling: Container[int]) -> str:
    return "grammar" if request.id in compiling else request.state.value


def shadow_words(scheduler: Scheduler, id: int) -> str:
    """How the shadow policy would have treated a request; empty without a shadow policy."""
    policy = scheduler.waiting_queue.online.policy
    if not isinstance(policy, Shadowed):
        return ""
    note = policy.note_of(id)
    if note is None:
        return f"{policy.name} would have changed nothing"
    found = []
    if note.num_preferred:
        passes = f"{note.num_preferred:,} passes" if note.num_preferred > 1 else "1 pass"
        words = f"would have admitted it in {passes} in which it waited"
        if note.earlier_s:
            words += f", {note.earlier_s:.3f} s earlier"
        found.append(words)
    if note.num_before:
        found.append(f"would have let it wait when it was admitted, {note.num_before:,} before it")
    return f"{policy.name} {' and '.join(found)}"


def _time_left(scheduler: Scheduler, request: Request, now: float) -> float | None:
    """Seconds until its deadline; None if it has none."""
    end_s = scheduler.limits.deadlines.end_s(request)
    return None if end_s == math.inf else end_s - now


class Reasons:
    """Why open requests make no progress, between two steps. `compiling` has the ids of requests
    whose grammar is being compiled."""

    def __init__(self, scheduler: Scheduler, compiling: Container[int] = ()) -> None:
        self._scheduler = scheduler
        self.compiling = compiling
        self._last = scheduler.history.last_pass
        # The reason for all requests after the one where the last pass stopped.
        self._reason_of_rest = ""

    def of(self, request: Request) -> str:
        """The reason; never empty for a waiting request, empty for a running one.

        For a waiting request it comes from the last walk over the queue, or says why there was no
        walk; for an open prompt without a piece in the last step, it is what the prompt lacked.
        """
        if request.id in self.compiling:
            return COMPILING
        scheduler = self._scheduler
        trace = scheduler.history.trace(request.id)
        assert trace is not None, "an open request has no trace"
        event = trace.events[-1]
        if request.row != NO_ROW:
            is_kept = event.kind in (EventKind.WAITING_REASON, EventKind.STALLED)
            return event.detail if is_kept else ""
        gate = scheduler.waiting_queue.gate
        if gate is not None and scheduler.waiting_queue.is_blocked(request):
            return gate.why
        last = self._last
        if last is not None and not trace.waits[-1].has_seen(last):
            last = None
        # The request itself was passed over, in the last walk or after it.
        if event.kind in PASSED_OVER and (last is None or event.last_walk >= last.last_walk):
            return event.detail
        if last is not None:
            return self._of_pass(last, trace)
        if event.kind is EventKind.RETRACTED:
            return f"taken back: {event.detail}"
        return NOT_LOOKED_AT

    def _of_pass(self, last: SchedulingPass, trace: RequestTrace) -> str:
        if last.id == trace.id:
            return _reason(self._scheduler, last, trace)
        if not self._reason_of_rest:
            self._reason_of_rest = _reason(self._scheduler, last, trace)
        return self._reason_of_rest


def _num_output(scheduler: Scheduler, request: Request) -> int:
    if request.row == NO_ROW:
        return request.fill_len - request.spec.prompt_len
    return scheduler.kv.columns.num_output(request.row)


def _explain(
    scheduler: Scheduler,
    trace: RequestTrace,
    now: float,
    cause: CacheCause | None,
    compiling: Container[int] = (),
) -> Explanation:
    """`trace` in words, with what its request does now if it is open."""
    before = trace.spent.step_before
    explanation = Explanation(
        id=trace.id,
        rid=trace.rid,
        state="finished",
        position=None,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        cached_tokens=trace.cached_tokens,
        stages=stage_times(trace, now),
        retractions=trace.spent.retractions.num,
        service=trace.service,
        recomputed_tokens=trace.spent.retractions.recomputed_tokens,
        refound_tokens=trace.spent.retractions.refound_tokens,
        why="",
        drafts=_drafts(scheduler, trace),
        shadow=shadow_words(scheduler, trace.id),
        explained_s=now,
        arrived_s=trace.arrived_s,
        admitted_s=trace.admitted_s,
        busy_until_s=NEVER if before is None else before.ended_s,
        busy_with="" if before is None else step_in_words(scheduler.history, before),
        times=time_parts(scheduler, trace, now, reason=_reason),
        longest_gap=longest_gap(scheduler, trace),
        cache_cause=cause,
        timeline=_timeline(scheduler, trace),
    )
    request = scheduler.requests.get(trace.id)
    if request is None or request.spec.arrival_order != trace.arrival_order:
        return explanation  # it has ended; another request may have the same id
    grammar = request.message.sampling.grammar
    return msgspec.structs.replace(
        explanation,
        state=_state(request, compiling),
        position=_position(scheduler, request, now),
        row=None if request.row == NO_ROW else request.row,
        grammar="" if grammar is None else grammar.name,
        output_tokens=_num_output(scheduler, request),
        why=Reasons(scheduler, compiling).of(request),
    )


def _drafts(scheduler: Scheduler, trace: RequestTrace) -> str:
    """The results of drafts of a request; for an open one also why its last step had none."""
    if not scheduler.settings.draft_sources:
        return "nothing is guessed (--speculative)"
    drafts = trace.drafts or RequestDrafts()
    found = []
    for source, count in drafts.by_source.items():
        found.append(f"{source}: {count.num_right:,} of {count.num_drafts:,} guesses were right")
    if not found:
        found.append("nothing was guessed")
    if drafts.why_none and scheduler.history.is_open(trace.id):
        found.append(f"none for the last step: {drafts.why_none}")
    elif drafts.why_none and not drafts.by_source:
        found.append(drafts.why_none)
    return "; ".join(found)


def _position(scheduler: Scheduler, request: Request, now: float) -> int | None:
    """Its position in the queue, from 0 on; None if it has a row."""
    if request.row != NO_ROW:
        return None
    for position, other in enumerate(list_waiting(scheduler, now)):
        if other is request:
            return position
    raise AssertionError("a request without a row is not in the queue")


def _timeline(scheduler: Scheduler, trace: RequestTrace) -> list[TimelineEntry]:
    entries = [_event_entry(trace, event) for event in trace.events]
    entries += _waiting_entries(scheduler, trace)
    if trace.dropped.num_events:
        after_cut = trace.events[MAX_EVENTS // 2]
        entries.append(_cut_entry(trace, after_cut, f"{trace.dropped.num_events:,} events"))
    entries.sort(key=lambda entry: (entry.first_step, entry.at_s))
    return entries


def _event_entry(trace: RequestTrace, event: Event) -> TimelineEntry:
    return TimelineEntry(
        at_s=event.time_s - trace.arrived_s,
        first_step=event.step,
        last_step=max(event.step, event.last_step),
        times=event.times,
        what=f"{event.kind.value}: {event.detail}" if event.detail else event.kind.value,
    )


def _cut_entry(trace: RequestTrace, before: Event, what: str) -> TimelineEntry:
    """An entry in the place of events that are not remembered or not shown."""
    return TimelineEntry(
        at_s=before.time_s - trace.arrived_s,
        first_step=before.step,
        last_step=before.step,
        times=1,
        what=f"left out here: {what}",
    )


def _waiting_entries(scheduler: Scheduler, trace: RequestTrace) -> list[TimelineEntry]:
    """The latest passes that left a request waiting, after an entry for what is left out.

    Walks that passed over the request itself are events, and are not repeated here.
    """
    found: list[tuple[Wait, SchedulingPass]] = []
    for wait in trace.waits:
        passes = scheduler.history.passes(wait)
        found += [(wait, one) for one in passes if not _is_explained(trace, one)]
    num_cut = max(len(found) - MAX_PASSES_SHOWN, 0)
    others = _Others(scheduler, trace)
    entries = [_waiting_entry(scheduler, trace, others, wait, one) for wait, one in found[num_cut:]]
    left_out = _left_out(scheduler, trace, num_cut)
    if left_out:
        at = Event(trace.arrived_s, trace.waits[0].since_step, EventKind.ARRIVED, "")
        if entries:
            time_s = entries[0].at_s + trace.arrived_s
            at = at._replace(time_s=time_s, step=entries[0].first_step)
        entries.insert(0, _cut_entry(trace, at, ", ".join(left_out)))
    return entries


def _left_out(scheduler: Scheduler, trace: RequestTrace, num_cut: int) -> list[str]:
    """The parts of a request's waiting that are not shown or not remembered."""
    left_out = []
    if num_cut:
        left_out.append(f"{num_cut:,} earlier reasons for waiting")
    forgotten_until = scheduler.history.forgotten_until
    for wait in trace.waits:
        if wait.since_walk <= min(forgotten_until, wait.until_walk - 1):
            left_out.append("reasons for waiting that are not remembered any more")
            break
    if trace.dropped.num_waits:
        left_out.append(f"{trace.dropped.num_waits:,} spans of waiting")
    return left_out


def _is_explained(trace: RequestTrace, one: SchedulingPass) -> bool:
    """Whether events of the request explain why it waited in all walks of this pass."""
    return any(
        event.explains(one.first_walk) and event.explains(one.last_walk) for event in trace.events
    )


def _waiting_entry(
    scheduler: Scheduler, trace: RequestTrace, others: _Others, wait: Wait, one: SchedulingPass
) -> TimelineEntry:
    """A pass in words. If it began before the wait, only the part in the wait counts."""
    at_s = max(one.first_s, wait.since_s)
    first_step = max(one.first_step, wait.since_step)
    times = one.times
    if first_step > one.first_step:
        times = min(times, one.last_step - first_step + 1)
    what = _reason(scheduler, one, trace)
    num_before = others.num_before(at_s)
    if num_before:
        what += f"; earlier requests that waited, too: {num_before:,}"
    return TimelineEntry(
        at_s=at_s - trace.arrived_s,
        first_step=first_step,
        last_step=max(one.last_step, first_step),
        times=times,
        what=what,
    )


class _Others:
    """The times in which earlier requests waited."""

    def __init__(self, scheduler: Scheduler, trace: RequestTrace) -> None:
        spans: list[tuple[float, float]] = []
        for other in scheduler.history.traces():
            if other.arrival_order < trace.arrival_order:
                spans += [(wait.since_s, wait.until_s) for wait in other.waits]
        self._waits = np.array(spans, dtype=np.float64).reshape(-1, 2)  # [n, 2] since, until

    def num_before(self, time_s: float) -> int:
        """How many of them waited at this time."""
        has_begun = self._waits[:, 0] <= time_s
        has_not_ended = self._waits[:, 1] > time_s
        return int(np.count_nonzero(has_begun & has_not_ended))


def _reason(scheduler: Scheduler, one: SchedulingPass, trace: RequestTrace) -> str:
    """Why the request at which this pass stopped, and the requests after it, waited."""
    name = "it" if one.id == trace.id else scheduler.history.name(one.id)
    settings = scheduler.settings
    match one.stop:
        case Stop.NO_TOKEN if one.id < 0:
            return "waits: no KV memory was left after the prefills of the same step"
        case Stop.NO_TOKEN:
            return f"waits: no KV memory for a prefill: {name} {_lack_of_memory(one)}"
        case Stop.COMPLETIONS:
            return (
                "waits: no KV memory before enough running requests complete: with "
                f"{name}, {one.needed:,} tokens will be needed "
                f"before one of the completions, and {max(one.available, 0):,} will be available"
            )
        case Stop.NO_GROUP_MEMORY if one.memory.is_tokens:
            return f"waits: no {one.memory.what}: {name} {_lack_of_memory(one)}"
        case Stop.NO_GROUP_MEMORY:
            return (
                f"waits: no {one.memory.what} is left for {name}: all are those of running "
                f"requests ({one.memory.option})"
            )
        case Stop.NO_ROW:
            limit = settings.max_running_requests
            return f"waits: as many requests run as --max-running-requests allows ({limit})"
        case Stop.BUDGET if one.id < 0:
            return "waits: the token budget of the step was used up by those admitted in it"
        case Stop.BUDGET if one.available <= 0:
            return f"waits: the tokens of the step were used up before {name}"
        case Stop.BUDGET:
            return (
                f"waits: the token budget of the step has {one.available:,} left, "
                f"{name} has {one.needed:,} to compute"
            )
        case Stop.ONLINE:
            return "waits: it is a background request, and others were admitted"
        case Stop.TIME:
            return (
                f"waits: the step has time for {counted(one.available, 'more token')} "
                f"({_bound(settings)}), "
                f"{name} has {one.needed:,} to compute"
            )
        case Stop.OPEN_PROMPT:
            return (
                f"waits: {name} has {counted(one.needed, 'token')} to compute, "
                f"the step has {one.available:,} left, and at most one prompt is open"
            )
        case Stop.DEFERRED:
            return "waits: the prefixes of many others are being computed by requests of this step"
        case Stop.ENCODER:
            return "waits for the image encoder, after many other requests"
        case Stop.LAYERS:
            return (
                "waits: the layers of other prompts are computed piece by piece "
                "(--split-prefill-layers), and no prompt begins before they are done"
            )
        case Stop.POLICY:
            policy = settings.schedule_policy
            return f"waits: the policy {policy} admits no request while others run"
        case Stop.TURN:
            return (
                "waits: running requests have their turn before any more of a prompt "
                f"({_bound(settings)})"
            )
        case Stop.ROOM:
            return "waits: running requests are being retracted for one of a far higher priority"
        case Stop.BARRIER:
            return (
                "waits: all engines come to the same step, to open or block their inputs there; "
                "no step runs meanwhile"
            )
        case Stop.DEVICE:
            return (
                "waits: weights or memory are being changed, or memory is released; "
                "no step runs meanwhile"
            )
        case Stop.FULL:
            return "waits: the batch is full, and no request has ended since"


def _bound(settings: SchedulerSettings) -> str:
    """The options that keep prompts from taking all steps."""
    bounds = {"--max-step-ms": settings.max_step_ms, "--max-slowdown": settings.max_slowdown}
    found = [option for option, bound in bounds.items() if bound > 0]
    if not found:
        found = [
            "--split-prefill-layers" if settings.split_prefill_layers else "--background-step-ms"
        ]
    return " or ".join(found)


def _lack_of_memory(one: SchedulingPass) -> str:
    available = max(one.available, 0)
    lack = f"needs {counted(one.needed, 'token')}, {available:,} are available"
    if one.memory is not KV_MEMORY:
        if one.free > one.available:
            lack += f" (of {one.free:,} free; others are promised to running requests)"
        return lack
    there = f"{one.free - one.evictable:,} free and {one.evictable:,} evictable"
    if one.free > one.available:
        return f"{lack} (of {there}; others are promised to running requests)"
    return f"{lack} ({there})"

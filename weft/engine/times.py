"""The time of a request in the engine, part by part, in words. The parts add up to all of it.

The seconds are those of `scheduler/times.py`. The time in the queue is divided further,
by what the history has of it: first by the events of the request itself, then by the walks over the
queue that left it waiting.

    arrived   grammar   |  a walk: no KV memory for r3   |  a walk: no row  | admitted
       | grammar        | queue                          | queue            |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from weft.config.numbers import counted
from weft.engine.pause import WHY as PAUSED
from weft.messages.control import LongestGap, TimePart
from weft.scheduler.history import (
    EventKind,
    RequestHistory,
    RequestTrace,
    SchedulingPass,
)
from weft.scheduler.request import NO_ROW
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.times import NEVER, Gap, GapSteps, Phase, Spent, SpentOn, StepNote

# Every part, in the order in which they are listed; docs/guides/why-slow.md explains them.
PARTS = {
    SpentOn.AHEAD: "step_before",
    SpentOn.OWN: "prefill",
    SpentOn.SHARED: "prefill_shared",
    SpentOn.ENCODE: "encoder",
    SpentOn.OTHERS: "prefill_waits",
    SpentOn.BETWEEN: "prefill_between",
    SpentOn.FIRST_DECODE: "first_decode",
    SpentOn.DECODE: "decode",
    SpentOn.MIXED: "decode_mixed",
    SpentOn.PROMPTS: "decode_stalled",
    SpentOn.REST: "decode_between",
    SpentOn.WAIT_AGAIN: "queue_again",
    SpentOn.AGAIN: "prefill_again",
}
WAITS = ("grammar", "stored", "handoff", "blocked", "queue")  # the parts of `SpentOn.WAIT`
PAUSE = "paused"  # taken out of the time between steps
BETWEEN_STEPS = "planning, messages, and a processor that others use"
IDLE_SHARE = 0.1  # of a gap, from which on the gap says that no step ran
MAX_REASONS = 6  # different reasons for waiting that are listed; the others are one part
CAME = "until a step was planned"

# Events that come in pairs or more: from the first to the last of them it waits for the same thing.
_SPANS = {
    EventKind.GRAMMAR: "grammar",
    EventKind.STORED: "stored",
    EventKind.HANDOFF: "handoff",
}

Reason = Callable[[Scheduler, SchedulingPass, RequestTrace], str]


class WaitSpan(NamedTuple):
    begin_s: float
    end_s: float
    part: str
    detail: str


def time_parts(
    scheduler: Scheduler, trace: RequestTrace, now: float, *, reason: Reason
) -> list[TimePart]:
    """All parts with some time, in their order. `reason` puts a walk over the queue into words."""
    spent = _so_far(scheduler, trace, now)
    parts = list(_waiting(scheduler, trace, spent, now, reason))
    details = _details(trace)
    for part, name in PARTS.items():
        seconds = spent.seconds[part]
        if part in (SpentOn.BETWEEN, SpentOn.REST):
            paused_s = min(_paused_s(trace, now, before_token=part is SpentOn.BETWEEN), seconds)
            if paused_s:
                parts.append(TimePart(part=PAUSE, seconds=paused_s, detail=PAUSED))
            seconds -= paused_s
        if seconds:
            parts.append(TimePart(part=name, seconds=seconds, detail=details.get(part, "")))
    return parts


def _so_far(scheduler: Scheduler, trace: RequestTrace, now: float) -> Spent:
    """The time of a request, of an open one up to now."""
    spent = trace.spent
    if trace.finished_s == NEVER:
        spent = replace(spent, seconds=list(spent.seconds))
        spent.close(max(now, spent.since_s), scheduler.history.clock.at(max(now, spent.since_s)))
    return spent


def _details(trace: RequestTrace) -> dict[SpentOn, str]:
    computed = trace.prompt_tokens - trace.cached_tokens
    num_pieces = 0
    for event in trace.events:
        if event.kind in (EventKind.ADMITTED, EventKind.CHUNK):
            num_pieces += event.times
    own = counted(computed, "token")
    if num_pieces > 1:
        own += f" in {num_pieces:,} pieces"
    again = trace.spent.retractions
    return {
        SpentOn.OWN: own,
        SpentOn.SHARED: "tokens of others in the same steps",
        SpentOn.OTHERS: "steps without a piece of its prompt",
        SpentOn.FIRST_DECODE: "the first step after its first token",
        SpentOn.BETWEEN: BETWEEN_STEPS,
        SpentOn.REST: BETWEEN_STEPS,
        SpentOn.MIXED: "steps that computed prompts of others, too",
        SpentOn.PROMPTS: "steps for prompts of others alone",
        SpentOn.WAIT_AGAIN: f"it was taken back {counted(again.num, 'time')}",
        SpentOn.AGAIN: f"{counted(again.recomputed_tokens, 'token')} that it had lost",
    }


# ---- the queue


def _waiting(
    scheduler: Scheduler, trace: RequestTrace, spent: Spent, now: float, reason: Reason
) -> Iterator[TimePart]:
    """The time before the first admission, by what it waited for."""
    begin_s = trace.arrived_s
    end_s = begin_s + spent.seconds[SpentOn.WAIT]
    totals: dict[tuple[str, str], float] = defaultdict(float)
    at_s = begin_s
    for span in [*_own_spans(trace, begin_s, end_s), WaitSpan(end_s, end_s, "", "")]:
        for one in _queue_spans(scheduler, trace, at_s, span.begin_s, reason):
            totals[one.part, one.detail] += one.end_s - one.begin_s
        if span.part:
            totals[span.part, span.detail] += span.end_s - span.begin_s
        at_s = span.end_s
    found = [
        TimePart(part=part, seconds=seconds, detail=detail)
        for (part, detail), seconds in totals.items()
        if seconds
    ]
    found.sort(key=lambda one: (WAITS.index(one.part), -one.seconds))
    yield from found[:MAX_REASONS]
    rest = found[MAX_REASONS:]
    if rest:
        seconds = sum(one.seconds for one in rest)
        yield TimePart(part="queue", seconds=seconds, detail=f"{len(rest):,} other reasons")


def _own_spans(trace: RequestTrace, begin_s: float, end_s: float) -> list[WaitSpan]:
    """The spans in which the request waited for something of its own: in order, without overlap.

    Of two that overlap, the earlier one counts, and of the later one what comes after it.
    """
    spans: list[WaitSpan] = []
    events = [event for event in trace.events if event.time_s <= end_s]
    for kind, part in _SPANS.items():
        own = [event for event in events if event.kind is kind]
        if own:
            # With only one event, what it waits for has not come.
            until_s = own[-1].time_s if len(own) > 1 or trace.admitted_s != NEVER else end_s
            spans.append(WaitSpan(own[0].time_s, until_s, part, own[-1].detail))
    for event, after in zip(events, [*events[1:], None], strict=True):
        if event.kind is EventKind.WAITING_REASON:
            until_s = end_s if after is None else after.time_s
            spans.append(WaitSpan(event.time_s, until_s, "blocked", event.detail))
    spans.sort()
    found: list[WaitSpan] = []
    at_s = begin_s
    for span in spans:
        start_s = max(span.begin_s, at_s)
        stop_s = min(span.end_s, end_s)
        if stop_s > start_s:
            found.append(span._replace(begin_s=start_s, end_s=stop_s))
            at_s = stop_s
    return found


def _queue_spans(
    scheduler: Scheduler, trace: RequestTrace, begin_s: float, end_s: float, reason: Reason
) -> Iterator[WaitSpan]:
    """A span of waiting, by the walks that left the request in the queue. A walk explains the time
    up to the next one."""
    at_s = begin_s
    why = CAME
    for walk_s, words in _walks(scheduler, trace, reason):
        if walk_s >= end_s:
            break
        if walk_s > at_s:
            yield WaitSpan(at_s, walk_s, "queue", why)
            at_s = walk_s
        why = words
    if end_s > at_s:
        yield WaitSpan(at_s, end_s, "queue", why)


def _walks(
    scheduler: Scheduler, trace: RequestTrace, reason: Reason
) -> Iterator[tuple[float, str]]:
    """When walks left the request waiting, and why, in order: for others, or for its own sake."""
    passes = scheduler.history.passes(trace.waits[0])
    own = [event for event in trace.events if event.kind is EventKind.DEFERRED]
    at = [(one.first_s, False, index) for index, one in enumerate(passes)]
    at += [(event.time_s, True, index) for index, event in enumerate(own)]
    for walk_s, is_own, index in sorted(at):
        if is_own:
            yield walk_s, own[index].detail
        else:
            yield walk_s, reason(scheduler, passes[index], trace).removeprefix("waits: ")


def _paused_s(trace: RequestTrace, now: float, *, before_token: bool) -> float:
    """Seconds after admission in which generation was paused."""
    if trace.admitted_s == NEVER:
        return 0.0
    ended_s = now if trace.finished_s == NEVER else trace.finished_s
    first_s = ended_s if trace.first_token_s == NEVER else trace.first_token_s
    low_s = trace.admitted_s if before_token else first_s
    high_s = first_s if before_token else ended_s
    found = 0.0
    events = trace.events
    for event, after in zip(events, [*events[1:], None], strict=True):
        if event.kind is EventKind.WAITING_REASON and event.detail == PAUSED:
            until_s = ended_s if after is None else after.time_s
            found += max(min(until_s, high_s) - max(event.time_s, low_s), 0.0)
    return found


# ---- between two tokens


def longest_gap(scheduler: Scheduler, trace: RequestTrace) -> LongestGap | None:
    """The longest time between two tokens, and what most of it went to."""
    gap = _gap_of(scheduler, trace)
    steps = gap.steps
    if steps is None:
        return None
    words = [*_own_waits(trace, gap), _steps_in_words(scheduler, gap.seconds, steps)]
    idle_s = gap.seconds - steps.seconds
    if len(words) == 1 and not steps.has_more and idle_s > IDLE_SHARE * gap.seconds:
        words.append(f"no step ran for {_length(idle_s)}")
    return LongestGap(
        seconds=gap.seconds,
        at_s=gap.until_s - trace.arrived_s,
        step=steps.longest.step,
        what="; ".join(words),
    )


def _own_waits(trace: RequestTrace, gap: Gap) -> Iterator[str]:
    """Why the request itself did not run in the gap."""
    began_s = gap.until_s - gap.seconds
    for event in trace.events:
        if not began_s <= event.time_s <= gap.until_s:
            continue
        if event.kind is EventKind.RETRACTED:
            yield f"it was taken back: {event.detail}"
        elif event.kind is EventKind.WAITING_REASON:
            yield event.detail


def _steps_in_words(scheduler: Scheduler, gap_s: float, steps: GapSteps) -> str:
    longest = steps.longest
    if steps.num == 1 or longest.ended_s - longest.began_s > gap_s / 2:
        return step_in_words(scheduler.history, longest)
    last = "last " if steps.has_more else ""
    words = step_in_words(scheduler.history, longest)
    return f"its {last}{steps.num} steps took {_length(steps.seconds)}; the longest, {words}"


def step_in_words(history: RequestHistory, step: StepNote) -> str:
    """What a step did, and for whom."""
    done = []
    if step.prompt_tokens:
        names = ", ".join(history.name(id) for id in step.ids)
        more = step.num_prompts - len(step.ids)
        if more > 0:
            names += f" and {counted(more, 'other')}"
        done.append(f"{counted(step.prompt_tokens, 'prompt token')} of {names}")
    if step.num_decoding:
        done.append(f"a token for each of {counted(step.num_decoding, 'request')}")
    return f"step {step.step:,} took {_length(step.ended_s - step.began_s)}: {', and '.join(done)}"


def _length(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1.0 else f"{1_000 * seconds:.1f} ms"


def _gap_of(scheduler: Scheduler, trace: RequestTrace) -> Gap:
    request = scheduler.requests.get(trace.id)
    if request is None or request.row == NO_ROW or trace.finished_s != NEVER:
        return trace.spent.gap
    if trace.spent.phase is not Phase.DECODES:
        return trace.spent.gap
    return scheduler.history.gaps.of(request.row)

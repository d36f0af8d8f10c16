"""What has happened: numbers that only grow (`Counters`), and what was decided about each request,
and why (`RequestHistory`).

The history explains the scheduler. It has two kinds of entries. An *event* concerns one request
(arrived, admitted, first token, retracted, finished). A *pass* is one walk over the queue that left
requests waiting, or that could not begin: it is written once, with what stopped it, and equal ones
in succession are counted, not repeated. Walks are numbered. Why a request waited follows from the
passes between its arrival and its admission, but for those walks in which it was held or deferred
itself, so that a thousand waiting requests cost no more than one. `engine/explain.py` puts it into
words.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

MAX_EVENTS = 64  # of one request; the first and the latest are kept
MAX_FINISHED = 1_024  # requests that are remembered after their end
MAX_PASSES = 2_048
NEVER = -1.0


@dataclass(slots=True)
class DraftCount:
    """What has become of the tokens that a source has guessed."""

    num_drafts: int = 0
    num_right: int = 0
    num_runs: int = 0  # of a request in a step

    @property
    def num_wrong(self) -> int:
        return self.num_drafts - self.num_right

    def add(self, num_drafts: int, num_right: int) -> None:
        self.num_drafts += num_drafts
        self.num_right += num_right
        self.num_runs += 1


NO_DRAFTS = DraftCount()


@dataclass
class Counters:
    """What has happened since the start."""

    num_steps: int = 0
    num_prefill_steps: int = 0
    num_split_steps: int = 0  # that computed some layers of prompts
    num_requests: int = 0  # that arrived; also the number of the next one
    num_duplicates: int = 0  # messages with the number of an open request
    num_unknown: int = 0  # messages that nobody handles
    num_unreadable: int = 0  # messages that could not be read
    num_failed: int = 0  # messages whose handling raised, and what else failed between two steps
    num_queue_full: int = 0  # requests refused because the queue was full
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_prefilled_tokens: int = 0  # computed, retracted requests counted again
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_shadow_admissions: int = 0  # that were compared with the choice of a shadow policy
    num_shadow_later: int = 0  # of these, requests that it would have let wait
    num_shadow_earlier: int = 0  # requests that it would have admitted while they waited
    num_faults: int = 0  # found in the books of memory, or raised by the scheduler
    drafts: dict[str, DraftCount] = field(default_factory=dict)  # by source

    def totals(self) -> dict[str, int]:
        """By the names that they have in `Stats`."""
        drafts: dict[str, int] = {}
        num_draft_runs = 0
        for source, count in self.drafts.items():
            num_draft_runs += count.num_runs
            drafts[f"total_drafts_{source}"] = count.num_drafts
            drafts[f"total_accepted_{source}"] = count.num_right
        return {
            **drafts,
            "total_draft_runs": num_draft_runs,
            "total_steps": self.num_steps,
            "total_prefill_steps": self.num_prefill_steps,
            "total_split_steps": self.num_split_steps,
            "total_prompt_tokens": self.num_prompt_tokens,
            "total_cached_tokens": self.num_cached_tokens,
            "total_prefilled_tokens": self.num_prefilled_tokens,
            "total_generated_tokens": self.num_generated_tokens,
            "total_retractions": self.num_retractions,
            "total_requests": self.num_requests,
            "total_aborted": self.num_aborted,
            "total_faults": self.num_faults,
            "total_shadow_admissions": self.num_shadow_admissions,
            "total_shadow_later": self.num_shadow_later,
            "total_shadow_earlier": self.num_shadow_earlier,
            "total_queue_full": self.num_queue_full,
            "total_dropped_messages": self.num_unreadable,
            "total_unknown_messages": self.num_unknown,
            "total_failed_messages": self.num_failed,
            "total_duplicate_requests": self.num_duplicates,
        }


class EventKind(Enum):
    ARRIVED = "arrived"
    SESSION = "session"  # it goes on where an earlier request of its session ended
    EXPECTED = "expected"  # when it will have its first token
    GRAMMAR = "grammar"  # it is being compiled, or ready
    HANDOFF = "handoff"  # of its prompt: another server computes it, or sends it, or does not
    STORED = "stored"  # of its prompt: it is being read, or has come, or comes too late
    PINNED = "pinned"  # what of its prompt stays cached, or why not
    ADMITTED = "admitted"  # whole, or its first chunk
    CHUNK = "chunk"  # another piece of its prompt
    LAYERS = "layers"  # some of them, for a piece of its prompt
    ENCODER = "image encoder"  # what it encodes for the prompt
    STALLED = "stalled"  # its open prompt gets no piece of this step
    DEFERRED = "deferred"  # its new prefix is being computed by another request of the pass
    # a part of the scheduler lets it wait, or the input is blocked, or generation paused
    WAITING_REASON = "held"
    RELEASED = "released"  # of the last two
    FIRST_TOKEN = "first token"
    RETRACTED = "retracted"
    FINISHED = "finished"


PASSED_OVER = frozenset(
    {EventKind.DEFERRED, EventKind.WAITING_REASON}
)  # a walk that leaves it waiting for its own sake
# Successive ones are counted.
_REPEATED = PASSED_OVER | {EventKind.CHUNK, EventKind.LAYERS, EventKind.STALLED}


class Event(NamedTuple):
    """Something that happened to a request, or did so `times` times in succession; then `detail` is
    of the last."""

    time_s: float
    step: int
    kind: EventKind
    detail: str
    last_step: int = -1  # of several
    times: int = 1
    first_walk: int = 0  # the last walk that had begun
    last_walk: int = 0  # of several

    def explains(self, walk: int) -> bool:
        """Whether the request was passed over in this walk, for its own sake."""
        if self.kind not in PASSED_OVER:
            return False
        in_every = self.times > self.last_walk - self.first_walk  # of the walks in between
        return walk == self.last_walk or (in_every and self.first_walk <= walk < self.last_walk)


class Stop(Enum):
    """What ended a walk over the queue, or kept it from beginning."""

    FULL = "full"  # since an earlier pass nothing could be admitted, and nothing has ended since
    NO_ROW = "no row"  # as many requests run as may
    NO_TOKEN = "no token"  # memory
    NO_WINDOW = "no window"  # memory of the layers with windows
    NO_STATE_SLOT = "no state slot"  # as many states are kept as may be
    BUDGET = "budget"  # the tokens of one step
    TIME = "time"  # of one step
    OPEN_PROMPT = "open prompt"  # it would have to be cut, and another one is
    DEFERRED = "deferred"  # so many wait for prefixes of this step that the walk ended
    ENCODER = "encoder"  # so many wait for it that the walk ended
    LAYERS = "layers"  # a prompt has layers left to compute
    POLICY = "policy"  # it lets nobody else join what runs
    TURN = "turn"  # running requests have theirs, before any more of a prompt
    ROOM = "room"  # it is being made by taking back running requests
    DEVICE = "device"  # it is busy with what is no step, or its memory is released


# Why a batch is full afterwards.
_FILLED = frozenset({Stop.FULL, Stop.NO_ROW, Stop.NO_TOKEN, Stop.NO_WINDOW, Stop.NO_STATE_SLOT})


class SchedulingPass:
    """One or more successive walks that ended alike. Numbers are those of the last one."""

    __slots__ = (
        "available",
        "first_s",
        "first_step",
        "first_walk",
        "free",
        "id",
        "last_s",
        "last_step",
        "last_walk",
        "needed",
        "stop",
        "times",
    )

    def __init__(self, time_s: float, step: int, walk: int, stop: Stop, id: int) -> None:
        self.first_s = time_s
        self.last_s = time_s
        self.first_step = step
        self.last_step = step
        self.first_walk = walk
        self.last_walk = walk
        self.stop = stop
        self.id = id  # the request at which it stopped, or -1
        self.needed = 0  # tokens that this one needed: of memory, or of the step's budget
        self.available = 0  # and that there were
        # tokens of memory that were free or evictable, some of them kept for running requests
        self.free = 0
        self.times = 0

    def goes_on(self, stop: Stop, id: int) -> bool:
        """Whether the next walk ended as this one did."""
        if stop is Stop.FULL and self.stop in _FILLED:
            return True
        return stop is self.stop and id == self.id


class Wait(NamedTuple):
    """A span in which a request stood in the queue."""

    since_s: float
    until_s: float
    since_step: int
    since_walk: int  # the first walk that may look at it
    until_walk: float = math.inf  # the first that need not: it was admitted, or has ended

    def has_seen(self, one: SchedulingPass) -> bool:
        """Whether that pass left the request waiting in this span."""
        return one.last_walk >= self.since_walk and one.first_walk < self.until_walk


class RequestTrace:
    """All that is remembered of one request. Times are NEVER if it has not come to that."""

    __slots__ = (
        "admitted_s",
        "arrival_order",
        "arrived_s",
        "cached_tokens",
        "drafts",
        "events",
        "finished_s",
        "first_token_s",
        "id",
        "no_draft",
        "num_events_dropped",
        "num_retractions",
        "num_waits_dropped",
        "output_tokens",
        "prompt_tokens",
        "recomputed_tokens",
        "refound_tokens",
        "rid",
        "waits",
    )

    def __init__(
        self,
        id: int,
        rid: str,
        arrival_order: int,
        prompt_tokens: int,
        now: float,
        step: int,
        walk: int = 0,
    ) -> None:
        self.id = id
        self.rid = rid
        self.arrival_order = arrival_order  # number of its arrival
        self.events: list[Event] = []
        self.waits = [Wait(now, math.inf, step, walk + 1)]
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0  # at its end
        self.cached_tokens = 0  # of the prompt, found at first admission
        self.drafts: dict[str, DraftCount] = {}  # by source
        self.no_draft = ""  # why its last step had none
        self.arrived_s = now
        self.admitted_s = NEVER
        self.first_token_s = NEVER
        self.finished_s = NEVER
        self.num_retractions = 0
        self.recomputed_tokens = 0  # that had been computed before a retraction
        self.refound_tokens = 0  # that had, and were still in the cache
        self.num_events_dropped = 0  # from the middle
        self.num_waits_dropped = 0  # from the middle

    def drafted(self, source: str, num_drafts: int, num_right: int) -> None:
        """The first `num_right` of the tokens that a source guessed were right."""
        self.drafts.setdefault(source, DraftCount()).add(num_drafts, num_right)

    def add(self, event: Event) -> None:
        events = self.events
        if events and event.kind in _REPEATED and events[-1].kind is event.kind:
            last = events[-1]
            events[-1] = event._replace(
                time_s=last.time_s,
                step=last.step,
                last_step=event.step,
                times=last.times + 1,
                first_walk=last.first_walk,
            )
            return
        if len(events) == MAX_EVENTS:
            del events[MAX_EVENTS // 2]
            self.num_events_dropped += 1
        events.append(event)

    @property
    def prefill_s(self) -> float:
        """From its first admission to its first token; 0 without a token."""
        return 0.0 if self.first_token_s == NEVER else self.first_token_s - self.admitted_s

    def stops_waiting(self, now: float, until_walk: float = math.inf) -> None:
        """It is admitted, or ends; that walk, and those that follow, do not leave it waiting."""
        if self.waits[-1].until_s > now:
            self.waits[-1] = self.waits[-1]._replace(until_s=now, until_walk=until_walk)

    def waits_again(self, now: float, step: int, walk: int = 0) -> None:
        if len(self.waits) == MAX_EVENTS:
            del self.waits[MAX_EVENTS // 2]
            self.num_waits_dropped += 1
        self.waits.append(Wait(now, math.inf, step, walk + 1))


class RequestHistory:
    """Remembers open requests, and the latest finished ones."""

    def __init__(self) -> None:
        self._open: dict[int, RequestTrace] = {}
        self._finished: OrderedDict[int, RequestTrace] = OrderedDict()
        self._passes: deque[SchedulingPass] = deque(maxlen=MAX_PASSES)
        self.num_walks = 0  # that have begun
        self.forgotten_until = 0  # the last walk of the passes that are not remembered any more

    # Written by the scheduler

    def begin_walk(self) -> None:
        """Somebody looks at the queue now, or would, if nothing kept the walk from beginning."""
        self.num_walks += 1

    def arrived(
        self,
        id: int,
        rid: str,
        arrival_order: int,
        prompt_tokens: int,
        num_before: int,
        now: float,
        step: int,
    ) -> None:
        walk = self.num_walks
        trace = RequestTrace(id, rid, arrival_order, prompt_tokens, now, step, walk)
        self._open[id] = trace
        detail = f"{prompt_tokens:,} prompt tokens"
        if num_before:
            detail += f"; {num_before:,} before it in the queue"
        trace.add(self._event(now, step, EventKind.ARRIVED, detail))

    def note(self, id: int, kind: EventKind, detail: str, now: float, step: int) -> None:
        """Write an event of an open request."""
        self._open[id].add(self._event(now, step, kind, detail))

    def admitted(
        self, id: int, found: int, fill_len: int, extend_end: int, now: float, step: int
    ) -> None:
        """`found` of the `fill_len` tokens that it has are cached; the step computes those behind
        them, up to `extend_end`."""
        trace = self._open[id]
        trace.stops_waiting(now, self.num_walks)
        if trace.admitted_s == NEVER:
            trace.admitted_s = now
            trace.cached_tokens = found
            detail = (
                f"{found:,} tokens cached, computes {found:,} to {extend_end:,} of {fill_len:,}"
            )
        else:
            trace.refound_tokens += found
            trace.recomputed_tokens += fill_len - found
            detail = (
                f"again: of its {fill_len:,} tokens {found:,} are still cached, "
                f"{fill_len - found:,} to compute"
            )
        trace.add(self._event(now, step, EventKind.ADMITTED, detail))

    def first_token(self, id: int, now: float, step: int) -> None:
        """There are tokens; the first time counts."""
        trace = self._open[id]
        if trace.first_token_s != NEVER:
            return
        trace.first_token_s = now
        trace.add(self._event(now, step, EventKind.FIRST_TOKEN, ""))

    def retracted(self, id: int, detail: str, now: float, step: int) -> None:
        trace = self._open[id]
        trace.num_retractions += 1
        trace.waits_again(now, step, self.num_walks)
        trace.add(self._event(now, step, EventKind.RETRACTED, detail))

    def waits_for(self, id: int, detail: str, now: float, step: int) -> None:
        """Nobody looks at it until it is released: no pass is the reason why it waits."""
        trace = self._open[id]
        trace.stops_waiting(now, self.num_walks + 1)
        trace.add(self._event(now, step, EventKind.WAITING_REASON, detail))

    def waits_no_more(self, id: int, detail: str, now: float, step: int) -> None:
        trace = self._open[id]
        trace.waits_again(now, step, self.num_walks)
        trace.add(self._event(now, step, EventKind.RELEASED, detail))

    def finished(
        self, id: int, detail: str, output_tokens: int, now: float, step: int
    ) -> RequestTrace:
        trace = self._open.pop(id)
        trace.stops_waiting(now, self.num_walks + 1)
        trace.finished_s = now
        trace.output_tokens = output_tokens
        trace.add(self._event(now, step, EventKind.FINISHED, detail))
        self._finished[id] = trace
        self._finished.move_to_end(id)
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)
        return trace

    def note_later(self, id: int, kind: EventKind, detail: str, now: float, step: int) -> None:
        """Write an event of a request that may have ended, if it is remembered."""
        trace = self.trace(id)
        if trace is not None:
            trace.add(self._event(now, step, kind, detail))

    def record_pass(
        self,
        time_s: float,
        step: int,
        stop: Stop,
        id: int = -1,
        *,
        needed: int = 0,
        available: int = 0,
        free: int = 0,
    ) -> None:
        """Write that the present walk left requests waiting. One that did not begin, because
        nothing has changed since the batch was full, counts with the pass that filled it."""
        last = self.last_pass
        if last is None or not last.goes_on(stop, id):
            if len(self._passes) == MAX_PASSES:
                self.forgotten_until = self._passes[0].last_walk
            last = SchedulingPass(time_s, step, self.num_walks, stop, id)
            self._passes.append(last)
        last.last_s = time_s
        last.last_step = step
        last.last_walk = self.num_walks
        if stop is not Stop.FULL:
            last.needed = needed
            last.available = available
            last.free = free
        last.times += 1

    def _event(self, now: float, step: int, kind: EventKind, detail: str) -> Event:
        walk = self.num_walks
        return Event(now, step, kind, detail, first_walk=walk, last_walk=walk)

    # Read by whoever explains

    def traces(self) -> Iterator[RequestTrace]:
        """Open requests, then finished ones, the newest first each."""
        yield from reversed(self._open.values())
        yield from reversed(self._finished.values())

    def is_open(self, id: int) -> bool:
        """Whether a request has arrived and not ended."""
        return id in self._open

    def trace(self, id: int) -> RequestTrace | None:
        return self._open.get(id) or self._finished.get(id)

    def name(self, id: int) -> str:
        """The rid of a request, as far as it is remembered."""
        trace = self.trace(id)
        return trace.rid if trace else f"request {id}"

    def passes(self, wait: Wait) -> list[SchedulingPass]:
        """The passes that left a request waiting in this span, oldest first."""
        return [one for one in self._passes if wait.has_seen(one)]

    @property
    def last_pass(self) -> SchedulingPass | None:
        return self._passes[-1] if self._passes else None

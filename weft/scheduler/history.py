"""What has happened: counters that only grow (`Counters`), and the decisions about each request
with their reasons (`RequestHistory`).

The history explains the scheduler. It has two kinds of entries. An *event* concerns one request
(arrived, admitted, first token, retracted, finished). A *pass* is one walk over the queue that left
requests waiting, or that could not begin. A pass is recorded once, with the reason for its end;
equal passes in succession are counted instead of repeated. Walks are numbered. The reasons for
which a request waited are the passes between its arrival and its admission, except for walks in
which the request itself was held or deferred. So recording a thousand waiting requests costs no
more than recording one. `engine/explain.py` puts the reasons into words.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft.arrays import LongArray
from weft.memory.prefix_cache import CacheKey
from weft.messages.replies import Finish
from weft.scheduler.batch import Batch
from weft.scheduler.groups.protocol import KV_MEMORY, MemoryName
from weft.scheduler.request import NO_ROW, Columns
from weft.scheduler.service import ONLINE, ServiceClass
from weft.scheduler.times import (
    DECODES,
    MAX_NAMED,
    NEVER,
    NO_ROWS,
    NO_TIME,
    NUM_PARTS,
    Spent,
    StepClock,
    StepNote,
    StepSpan,
    TokenGaps,
)

MAX_EVENTS = 64  # of one request; the first and the latest are kept
MAX_FINISHED = 1_024  # finished requests that are remembered
MAX_PASSES = 2_048
MAX_KEY_BYTES = 16 << 20  # of the sequences of finished requests


@dataclass(slots=True)
class DraftCount:
    """What became of the tokens that one source of drafts guessed."""

    num_drafts: int = 0
    num_right: int = 0
    num_runs: int = 0  # number of times that a request had drafts in a step

    def add(self, num_drafts: int, num_right: int) -> None:
        self.num_drafts += num_drafts
        self.num_right += num_right
        self.num_runs += 1


@dataclass(slots=True)
class RequestDrafts:
    """What became of the drafts of one request."""

    by_source: dict[str, DraftCount] = field(default_factory=dict)
    why_none: str = ""  # why it had no draft in its last step

    def add(self, source: str, num_drafts: int, num_right: int) -> None:
        """The first `num_right` of the tokens that a source guessed were right."""
        self.by_source.setdefault(source, DraftCount()).add(num_drafts, num_right)

    def of(self, source: str) -> DraftCount:
        return self.by_source.get(source) or DraftCount()


@dataclass(slots=True)
class StepCounts:
    num_all: int = 0
    num_prefill: int = 0  # of these, with prompts
    num_split: int = 0  # that computed some layers of prompts


@dataclass(slots=True)
class FailedMessages:
    """Messages that did nothing."""

    num_duplicates: int = 0  # with the id of an open request
    num_unknown: int = 0  # without a handler
    num_unreadable: int = 0
    num_failed: int = 0  # whose handling raised, and other failures between two steps


@dataclass(slots=True)
class BackgroundCounts:
    """Background requests that ended, their computed prompts, and what they generated."""

    num_ended: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    def ended(self, finish: Finish) -> None:
        self.num_ended += 1
        self.num_prompt_tokens += finish.prompt_tokens - finish.cached_tokens
        self.num_generated_tokens += finish.completion_tokens


@dataclass(slots=True)
class ShadowCounts:
    num_admissions: int = 0  # that were compared with a shadow policy
    num_later: int = 0  # of these, requests that the shadow policy would have admitted later
    num_earlier: int = 0  # waiting requests that it would have admitted earlier


@dataclass
class Counters:
    """Counts since the start. Those of one idea are together."""

    num_requests: int = 0  # requests that arrived; also the arrival order of the next one
    num_queue_full: int = 0  # requests refused because the queue was full
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, tokens found in the prefix cache
    num_prefilled_tokens: int = 0  # computed tokens; those of retracted requests count again
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_faults: int = 0  # found in the accounts of memory, or raised by the scheduler
    drafts: dict[str, DraftCount] = field(default_factory=dict)  # by source
    steps: StepCounts = field(default_factory=StepCounts)
    messages: FailedMessages = field(default_factory=FailedMessages)
    background: BackgroundCounts = field(default_factory=BackgroundCounts)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)

    def totals(self) -> dict[str, int]:
        """The counts by their names in `Stats`."""
        drafts: dict[str, int] = {}
        num_draft_runs = 0
        for source, count in self.drafts.items():
            num_draft_runs += count.num_runs
            drafts[f"total_drafts_{source}"] = count.num_drafts
            drafts[f"total_accepted_{source}"] = count.num_right
        return {
            **drafts,
            "total_draft_runs": num_draft_runs,
            "total_steps": self.steps.num_all,
            "total_prefill_steps": self.steps.num_prefill,
            "total_split_steps": self.steps.num_split,
            "total_prompt_tokens": self.num_prompt_tokens,
            "total_cached_tokens": self.num_cached_tokens,
            "total_prefilled_tokens": self.num_prefilled_tokens,
            "total_generated_tokens": self.num_generated_tokens,
            "total_background": self.background.num_ended,
            "total_background_prompt_tokens": self.background.num_prompt_tokens,
            "total_background_generated_tokens": self.background.num_generated_tokens,
            "total_retractions": self.num_retractions,
            "total_requests": self.num_requests,
            "total_aborted": self.num_aborted,
            "total_faults": self.num_faults,
            "total_shadow_admissions": self.shadow.num_admissions,
            "total_shadow_later": self.shadow.num_later,
            "total_shadow_earlier": self.shadow.num_earlier,
            "total_queue_full": self.num_queue_full,
            "total_dropped_messages": self.messages.num_unreadable,
            "total_unknown_messages": self.messages.num_unknown,
            "total_failed_messages": self.messages.num_failed,
            "total_duplicate_requests": self.messages.num_duplicates,
        }


class EventKind(Enum):
    ARRIVED = "arrived"
    SESSION = "session"  # it continues an earlier request of its session
    EXPECTED = "expected"  # the expected time of its first token
    GRAMMAR = "grammar"  # it is being compiled, or is ready
    HANDOFF = "handoff"  # another server computes its prompt, sends its KV, or does not
    STORED = "stored"  # its KV is being read from a store, has been read, or comes too late
    PINNED = "pinned"  # the beginning of its prompt that stays cached, or why it does not
    ADMITTED = "admitted"  # all of it, or its first chunk
    CHUNK = "chunk"  # another piece of its prompt
    LAYERS = "layers"  # some layers of a piece of its prompt
    ENCODER = "image encoder"  # the items that are encoded for its prompt
    STALLED = "stalled"  # its open prompt gets no piece of this step
    DEFERRED = "deferred"  # another request of the pass computes its new prefix
    # a feature makes it wait, input is blocked, or generation is paused
    WAITING_REASON = "held"
    RELEASED = "released"  # ends one of the last two
    FIRST_TOKEN = "first token"
    RETRACTED = "retracted"
    FINISHED = "finished"


PASSED_OVER = frozenset(
    {EventKind.DEFERRED, EventKind.WAITING_REASON}
)  # a walk that leaves it waiting for its own sake
# Successive events of these kinds are counted.
_REPEATED = PASSED_OVER | {EventKind.CHUNK, EventKind.LAYERS, EventKind.STALLED}


class Event(NamedTuple):
    """An event of a request, or `times` events in succession; then `detail` belongs to the last
    one."""

    time_s: float
    step: int
    kind: EventKind
    detail: str
    last_step: int = -1  # of several events
    times: int = 1
    first_walk: int = 0  # the last walk that had begun
    last_walk: int = 0  # of several events

    def explains(self, walk: int) -> bool:
        """Whether this walk passed over the request for a reason of the request itself."""
        if self.kind not in PASSED_OVER:
            return False
        # it happened in each walk in between
        in_every = self.times > self.last_walk - self.first_walk
        return walk == self.last_walk or (in_every and self.first_walk <= walk < self.last_walk)


class Stop(Enum):
    """Why a walk over the queue ended or could not begin."""

    FULL = "full"  # an earlier pass could admit no more, and no request has ended since
    NO_ROW = "no row"  # as many requests run as are allowed
    NO_TOKEN = "no token"  # no KV memory
    # no KV memory, before some running request of a known length ends
    COMPLETIONS = "completions"
    NO_GROUP_MEMORY = "no group memory"  # of layers with memory of their own
    BUDGET = "budget"  # the tokens of one step are used up
    TIME = "time"  # the time of one step is used up
    OPEN_PROMPT = "open prompt"  # the prompt would have to be cut, but another prompt is open
    DEFERRED = "deferred"  # the walk ended after many requests that wait for prefixes of this step
    ENCODER = "encoder"  # the walk ended after many requests that wait for the encoder
    LAYERS = "layers"  # a prompt has layers left to compute
    POLICY = "policy"  # the policy lets no other request join the running ones
    TURN = "turn"  # running requests have their turn before the next piece of a prompt
    ROOM = "room"  # running requests are being retracted to make room
    BARRIER = "barrier"  # the engines that keep step meet, to open or block their inputs
    ONLINE = "online"  # online requests were admitted, and the others are background requests
    DEVICE = "device"  # the device does other work, or its memory is released


# Reasons after which the batch is full.
_FILLED = frozenset({Stop.FULL, Stop.NO_ROW, Stop.NO_TOKEN, Stop.NO_GROUP_MEMORY})


class SchedulingPass:
    """One or more successive walks with the same end. Numbers are those of the last walk."""

    __slots__ = (
        "available",
        "evictable",
        "first_s",
        "first_step",
        "first_walk",
        "free",
        "id",
        "last_s",
        "last_step",
        "last_walk",
        "memory",
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
        self.needed = 0  # tokens of memory, or of the step's budget, that this request needed
        self.available = 0  # tokens that were available
        # tokens of memory that were free or evictable; some of them are reserved for running
        # requests
        self.free = 0
        self.evictable = 0  # of these
        self.memory = KV_MEMORY  # which memory was short
        self.times = 0

    def goes_on(self, stop: Stop, id: int) -> bool:
        """Whether the next walk ended in the same way."""
        if stop is Stop.FULL and self.stop in _FILLED:
            return True
        return stop is self.stop and id == self.id


class Wait(NamedTuple):
    """A span of time in which a request was in the queue."""

    since_s: float
    until_s: float
    since_step: int
    since_walk: int  # the first walk that may look at it
    until_walk: float = math.inf  # the first walk that may not: it was admitted, or has ended

    def has_seen(self, one: SchedulingPass) -> bool:
        """Whether this pass left the request waiting in this span."""
        return one.last_walk >= self.since_walk and one.first_walk < self.until_walk


class Reuse(NamedTuple):
    """What a request found in the cache at its first admission, and could have found."""

    cached_len: int  # tokens of its prompt that it found
    reusable_len: int  # tokens of its prompt that may come from the cache
    matched_len: int  # of these, cached, whether or not a request can resume after them
    num_emptied: int  # the cache had been emptied so often
    tenant: str = ""  # of the request


class NumDropped(NamedTuple):
    """How much was dropped from the middle of what is remembered of a request."""

    num_events: int
    num_waits: int


NOTHING_DROPPED = NumDropped(0, 0)


@dataclass(slots=True, eq=False)
class RequestTrace:
    """All that is remembered of one request. Times are NEVER until they are known."""

    id: int
    rid: str
    arrival_order: int  # number of its arrival
    prompt_tokens: int
    waits: list[Wait]  # the first one begins with its arrival
    spent: Spent
    service: str = ONLINE.name  # its class
    first_token_s: float = NEVER
    finished_s: float = NEVER
    output_tokens: int = 0  # known at its end
    reuse: Reuse | None = None  # None until it is admitted
    key: CacheKey | None = None  # of the prompt and the output, once it has ended
    events: list[Event] = field(default_factory=list)
    drafts: RequestDrafts | None = None  # None until it could have had drafts
    dropped: NumDropped = NOTHING_DROPPED

    @property
    def arrived_s(self) -> float:
        return self.waits[0].since_s

    @property
    def admitted_s(self) -> float:
        """When it first got a row."""
        return self.spent.admitted_s

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found at first admission."""
        return 0 if self.reuse is None else self.reuse.cached_len

    @property
    def prefill_s(self) -> float:
        """Time from first admission to first token; 0 without a token."""
        return 0.0 if self.first_token_s == NEVER else self.first_token_s - self.spent.admitted_s

    def stops_waiting(self, now: float, until_walk: float = math.inf) -> None:
        """The request is admitted, or ends: walk `until_walk` and later ones do not leave it
        waiting."""
        if self.waits[-1].until_s > now:
            self.waits[-1] = self.waits[-1]._replace(until_s=now, until_walk=until_walk)

    def waits_again(self, now: float, step: int, walk: int = 0) -> None:
        if len(self.waits) == MAX_EVENTS:
            del self.waits[MAX_EVENTS // 2]
            self.dropped = self.dropped._replace(num_waits=self.dropped.num_waits + 1)
        self.waits.append(Wait(now, math.inf, step, walk + 1))


class Undecoded:
    """The requests that have their first tokens, and have not decoded yet."""

    def __init__(self) -> None:
        self.traces: dict[int, RequestTrace] = {}  # by row

    def decoded(self, step: StepSpan, at: LongArray) -> None:
        """Those in the rows `at` [n] have decoded in this step; a row may come several times."""
        for row in self.traces.keys() & at.tolist():
            trace = self.traces.pop(row)
            # Its first token may have been noted when it had left its row already.
            if trace.finished_s == NEVER and trace.spent.phase is DECODES:
                trace.spent.computed(step, 1, is_last=True)


class RequestHistory:
    """Remembers open requests, and the latest finished ones."""

    def __init__(self, num_rows: int = 0) -> None:
        """`num_rows`: of the table of running requests."""
        self.clock = StepClock()
        self.gaps = TokenGaps(num_rows)
        self._open: dict[int, RequestTrace] = {}
        self._finished: OrderedDict[int, RequestTrace] = OrderedDict()
        self._passes: deque[SchedulingPass] = deque(maxlen=MAX_PASSES)
        self._key_bytes = 0  # of the sequences of finished requests
        self._undecoded = Undecoded()
        self.num_walks = 0  # walks that have begun
        self.forgotten_until = 0  # the last walk of the passes that were dropped

    # Written by the scheduler

    def begin_walk(self) -> None:
        """A walk over the queue begins, or would begin if nothing prevented it."""
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
        service: ServiceClass = ONLINE,
    ) -> None:
        trace = RequestTrace(
            id=id,
            rid=rid,
            arrival_order=arrival_order,
            prompt_tokens=prompt_tokens,
            waits=[Wait(now, math.inf, step, self.num_walks + 1)],
            spent=Spent(now, [0.0] * NUM_PARTS, self.gaps.last_step),
            service=service.name,
        )
        self._open[id] = trace
        detail = f"{prompt_tokens:,} prompt tokens"
        if num_before:
            detail += f"; {num_before:,} before it in the queue"
        if service is not ONLINE:
            detail += f"; {service.name}"
        self._add(trace, now, step, EventKind.ARRIVED, detail)

    def note(self, id: int, kind: EventKind, detail: str, now: float, step: int) -> None:
        """Record an event of an open request."""
        self._add(self._open[id], now, step, kind, detail)

    def note_ended(self, id: int, kind: EventKind, detail: str, now: float, step: int) -> None:
        """Record an event of a request that has ended. Does nothing if it is forgotten."""
        trace = self._finished.get(id)
        if trace is not None:
            self._add(trace, now, step, kind, detail)

    def admitted(
        self, id: int, found: int, fill_len: int, extend_end: int, now: float, step: int
    ) -> RequestTrace:
        """Of its `fill_len` tokens, `found` are cached; the step computes the next ones, up to
        `extend_end`."""
        trace = self._open[id]
        trace.stops_waiting(now, self.num_walks)
        spent = trace.spent
        if spent.admitted_s == NEVER:
            detail = (
                f"{found:,} tokens cached, computes {found:,} to {extend_end:,} of {fill_len:,}"
            )
        else:
            spent.found_again(found, fill_len)
            detail = (
                f"again: of its {fill_len:,} tokens {found:,} are still cached, "
                f"{fill_len - found:,} to compute"
            )
        spent.admitted(now, has_tokens=trace.first_token_s != NEVER)
        self._add(trace, now, step, EventKind.ADMITTED, detail)
        return trace

    def stepped(
        self,
        batch: Batch,
        columns: Columns,
        began_s: float,
        now: float,
        encoder_s: float,
        *,
        has_tokens: bool = True,
    ) -> None:
        """The result of a step is known, and its tokens are in the columns, if it has any. The
        device began it at `began_s`, and its encoder took `encoder_s` of the time."""
        facts = batch.facts
        at = facts.at if has_tokens else NO_ROWS
        if has_tokens and facts.as_of != columns.num_changes:
            at = at[columns.epoch.take(at) == facts.epochs]
        if batch.prefills:
            note = self._prefilled(batch, columns, at, began_s, now, encoder_s)
            self.gaps.add(note, at)
        else:
            note = StepNote(batch.plan.step, began_s, now, 0, len(batch.rows))
            self.decoded(note, at, encoder_s)

    def decoded(self, note: StepNote, at: LongArray, encoder_s: float = 0.0) -> None:
        """The rows `at` [n] have a token of a step without prompts."""
        before = self.clock.at(note.began_s) if self._undecoded.traces else NO_TIME
        self.clock.decoded(note.began_s, note.ended_s, encoder_s)
        if self._undecoded.traces:
            after = self.clock.totals
            step = StepSpan(note.began_s, note.ended_s, encoder_s, 0, before, after)
            self._undecoded.decoded(step, at)
        self.gaps.add(note, at)

    def _prefilled(
        self,
        batch: Batch,
        columns: Columns,
        at: LongArray,
        began_s: float,
        now: float,
        encoder_s: float,
    ) -> StepNote:
        """A step with prompts has ended: add its time to the requests whose prompts it computed.
        The rows `at` [n] have tokens of it."""
        prefills = batch.prefills
        num_prompts = len(prefills)
        lens = batch.lens[:num_prompts].tolist()
        num_decoding = len(batch.rows) - num_prompts
        num_tokens = len(batch.plan.tokens)
        step = self.clock.prefilled(
            began_s, now, encoder_s, num_tokens, has_decode=num_decoding > 0
        )
        # A burst of prompts leaves many that wait for their first decode.
        if num_decoding and self._undecoded.traces:
            self._undecoded.decoded(step, at)
        for request, num_own in zip(prefills, lens, strict=True):
            row = request.row
            if row == NO_ROW:
                continue  # it has ended in the meantime
            trace = self._open[request.id]
            is_last = bool(columns.known_len[row] > request.fill_len)
            trace.spent.computed(step, num_own, is_last=is_last)
            if not is_last:
                continue
            self.gaps.enter(row, trace.spent.gap, now)
            if trace.first_token_s == NEVER:
                trace.first_token_s = now
                self._undecoded.traces[row] = trace
                self._add(trace, now, batch.plan.step, EventKind.FIRST_TOKEN, "")
        ids = tuple([request.id for request in prefills[:MAX_NAMED]])
        return StepNote(batch.plan.step, began_s, now, sum(lens), num_decoding, ids, num_prompts)

    def leaves_row(self, id: int, row: int) -> None:
        """An open request is about to leave its row."""
        trace = self._open[id]
        self._undecoded.traces.pop(row, None)
        if trace.spent.phase is DECODES:
            trace.spent.gap = self.gaps.of(row)

    def retracted(self, id: int, detail: str, now: float, step: int) -> None:
        trace = self._open[id]
        trace.spent.retracted(now, self.clock.at(now))
        trace.waits_again(now, step, self.num_walks)
        self._add(trace, now, step, EventKind.RETRACTED, detail)

    def waits_for(self, id: int, detail: str, now: float, step: int) -> None:
        """No walk looks at the request until it is released, so no pass explains why it waits."""
        trace = self._open[id]
        trace.stops_waiting(now, self.num_walks + 1)
        self._add(trace, now, step, EventKind.WAITING_REASON, detail)

    def waits_no_more(self, id: int, detail: str, now: float, step: int) -> None:
        trace = self._open[id]
        trace.waits_again(now, step, self.num_walks)
        self._add(trace, now, step, EventKind.RELEASED, detail)

    def finished(
        self,
        id: int,
        detail: str,
        output_tokens: int,
        now: float,
        step: int,
        key: CacheKey | None = None,
    ) -> RequestTrace:
        """`key`: of its prompt and output; None if they are not cached."""
        trace = self._open.pop(id)
        trace.stops_waiting(now, self.num_walks + 1)
        trace.spent.close(now, self.clock.at(now))
        trace.finished_s = now
        trace.output_tokens = output_tokens
        self._add(trace, now, step, EventKind.FINISHED, detail)
        self._finished[id] = trace
        self._finished.move_to_end(id)
        if len(self._finished) > MAX_FINISHED:
            _, forgotten = self._finished.popitem(last=False)
            self._forget_key(forgotten)
        if key is not None:
            trace.key = key
            self._key_bytes += len(key.tokens)
            if self._key_bytes > MAX_KEY_BYTES:
                self._forget_oldest_keys()
        return trace

    def _forget_oldest_keys(self) -> None:
        for trace in self._finished.values():
            self._forget_key(trace)
            if self._key_bytes <= MAX_KEY_BYTES:
                return

    def _forget_key(self, trace: RequestTrace) -> None:
        if trace.key is not None:
            self._key_bytes -= len(trace.key.tokens)
            trace.key = None

    def note_later(self, id: int, kind: EventKind, detail: str, now: float, step: int) -> None:
        """Record an event of a request that may have ended, if it is remembered."""
        trace = self.trace(id)
        if trace is not None:
            self._add(trace, now, step, kind, detail)

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
        evictable: int = 0,
        memory: MemoryName = KV_MEMORY,
    ) -> None:
        """Record that the current walk left requests waiting. A walk that did not begin, because
        nothing has changed since the batch was full, counts with the pass that filled the batch."""
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
            last.evictable = evictable
            last.memory = memory
        last.times += 1

    def _add(
        self, trace: RequestTrace, now: float, step: int, kind: EventKind, detail: str
    ) -> None:
        """Add an event, or count it with the last one, if it repeats that."""
        events = trace.events
        walk = self.num_walks
        if events and events[-1].kind is kind and kind in _REPEATED:
            last = events[-1]
            events[-1] = Event(
                last.time_s, last.step, kind, detail, step, last.times + 1, last.first_walk, walk
            )
            return
        if len(events) == MAX_EVENTS:
            del events[MAX_EVENTS // 2]
            dropped = trace.dropped
            trace.dropped = dropped._replace(num_events=dropped.num_events + 1)
        # Without names, which would take longer: each request has four events and more.
        events.append(Event(now, step, kind, detail, -1, 1, walk, walk))

    # For `engine/explain.py`

    def traces(self) -> Iterator[RequestTrace]:
        """Open requests, then finished ones; the newest first in both."""
        yield from reversed(self._open.values())
        yield from reversed(self._finished.values())

    def is_open(self, id: int) -> bool:
        """Whether a request has arrived and not ended."""
        return id in self._open

    def trace(self, id: int) -> RequestTrace | None:
        return self._open.get(id) or self._finished.get(id)

    def name(self, id: int) -> str:
        """The rid of a request, if it is remembered."""
        trace = self.trace(id)
        return trace.rid if trace else f"request {id}"

    def passes(self, wait: Wait) -> list[SchedulingPass]:
        """The passes that left a request waiting in this span, oldest first."""
        return [one for one in self._passes if wait.has_seen(one)]

    @property
    def last_pass(self) -> SchedulingPass | None:
        return self._passes[-1] if self._passes else None

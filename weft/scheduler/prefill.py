"""The pass before a step: it chooses the prompts, or pieces of prompts, that the step computes.

The walk goes over the queue in the policy's order and adds requests while they fit. It ends at the
first request that does not fit, so that small requests do not pass a large one for ever. The
history records why it ended. This module knows no results, and ends no request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import (
    AddResult,
    NewTokenRatio,
    PieceBudget,
    PrefillAdder,
    PrefixSharing,
    careful_ratio,
    expected_tokens,
    new_sharing,
)
from weft.scheduler.batch import NO_ROWS, Batch, RunningBatch
from weft.scheduler.feature import FeatureHooks, QueueWalk
from weft.scheduler.groups.protocol import GroupBudget, Lack, PassFacts, Shortage
from weft.scheduler.history import Counters, EventKind, RequestHistory, Reuse, Stop
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import RequestLimits
from weft.scheduler.pace.pace import NOBODY_WAITS, Pace, Waiting
from weft.scheduler.planner import Planner
from weft.scheduler.policies.protocol import RequestClasses
from weft.scheduler.request import Request, RequestState
from weft.scheduler.reserve.completions import CompletionBudget, can_simulate
from weft.scheduler.retraction import victims_for
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting.line import WaitingLine
from weft.scheduler.waiting.queue import WaitingQueue

# A pass ends after this many requests that wait for the encoder.
MAX_PASSED_OVER = 64
WAITS_FOR_ENCODER = "waits for the image encoder"
STOPS = {
    Lack.MEMORY: Stop.NO_TOKEN,
    Lack.COMPLETIONS: Stop.COMPLETIONS,
    Lack.GROUP: Stop.NO_GROUP_MEMORY,
    Lack.TOKENS: Stop.BUDGET,
    Lack.TIME: Stop.TIME,
    Lack.OPEN_PROMPT: Stop.OPEN_PROMPT,
}


class RoomForFirst(NamedTuple):
    """The requests to retract so that the first waiting request can be admitted."""

    victims: list[Request]  # running requests
    # The order of the queue, which was needed to find the first request: ordering 100,000 takes as
    # long as a step. None: no order was made, or the pass needs a new one.
    order: Iterator[Request] | None = None


class LineWalk(NamedTuple):
    """A walk over one line of the queue. `is_through`: no request lacked anything that a request of
    the next line would take."""

    batch: Batch | None
    is_through: bool


NOBODY = LineWalk(None, is_through=True)
NOBODY_FITS = LineWalk(None, is_through=False)


class Picked(NamedTuple):
    """The requests that a walk has picked. `is_through`: it has looked at all of the line."""

    requests: list[Request]
    is_through: bool


NO_ROOM = RoomForFirst([])  # shared, so its list must stay empty


class PassLog:
    """Writes into the histories of requests what a pass decides, and why its walks end."""

    def __init__(self, history: RequestHistory, planner: Planner) -> None:
        self.history = history
        self._planner = planner  # numbers the steps

    def record_stop(
        self,
        now: float,
        result: AddResult,
        request: Request,
        adder: PrefillAdder,
        *,
        was_picked: bool,
    ) -> None:
        """Record why the walk ended, with the numbers of that moment."""
        if was_picked:
            self.record_pass(now, Stop.BUDGET if result is AddResult.OTHER else Stop.NO_TOKEN)
            return
        shortage = adder.shortage
        assert shortage is not None, "a request was refused without a reason"
        self.record_pass(now, STOPS[shortage.lack], request, shortage)

    def record_pass(
        self,
        now: float,
        stop: Stop,
        last: Request | None = None,
        shortage: Shortage | None = None,
    ) -> None:
        """Record the end of a walk, and what the request `last` lacks, if there is one."""
        id = -1 if last is None else last.id
        step = self._planner.num_steps
        if shortage is None:
            self.history.record_pass(now, step, stop, id)
            return
        self.history.record_pass(
            now,
            step,
            stop,
            id,
            needed=shortage.needed,
            available=shortage.available,
            free=shortage.free,
            evictable=shortage.evictable,
            memory=shortage.memory,
        )

    def note(self, now: float, request: Request, kind: EventKind, detail: str) -> None:
        self.history.note(request.id, kind, detail, now, self._planner.num_steps)


class PrefillScheduler:
    """Admits waiting requests. It keeps what the next pass must know of earlier passes.

    `pace` says how long a step may take.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        kv: KvMemory,
        queue: WaitingQueue,
        running: RunningBatch,
        hooks: FeatureHooks,
        pace: Pace,
        limits: RequestLimits,
        planner: Planner,
        history: RequestHistory,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._piece_len = settings.piece_len  # None: prompts are never cut
        self._kv = kv
        self._queue = queue
        self._running = running
        self._hooks = hooks
        self._pace = pace
        self._limits = limits
        self._planner = planner
        self._log = PassLog(history, planner)
        self._counters = counters
        self.chunked_req: Request | None = None  # the request whose prompt is partly computed
        self.new_token_ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._num_queue_walks = 0  # number of walks with features that limit batches
        self.seen: set[int] = set()  # ids of requests that the last pass looked at

    def apply(self, settings: SchedulerSettings) -> None:
        """Use these settings from the next pass on."""
        if settings.schedule_conservativeness != self._settings.schedule_conservativeness:
            self.new_token_ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._settings = settings
        self._piece_len = settings.piece_len
        self.note_room()  # or another request may be first

    def reset(self) -> None:
        """No request has a row any more."""
        self.chunked_req = None
        self.note_room()

    def note_room(self) -> None:
        """A request may be admitted again."""
        for line in self._queue.lines:
            line.is_full = False

    def open_prompts(self) -> list[Request]:
        """The requests whose prompts are partly computed."""
        return [] if self.chunked_req is None else [self.chunked_req]

    def row_released(self, request: Request) -> None:
        """A request has released its row."""
        if request is self.chunked_req:
            self.chunked_req = None
        self.note_room()

    def next_batch(self, now: float, order: Iterator[Request] | None = None) -> Batch | None:
        """Admit waiting requests as far as memory and the budgets of a step allow. `order`: the
        order of the online requests, if it is known already.

        Returns a batch with prefills, or None if no prompt can be computed. Background requests are
        looked at if no online request could run, and none lacks what they would take.
        """
        pace = self._pace
        # Most steps follow a decode step and need no further check.
        if pace.since_s > 0 and pace.decode_is_due(
            self._waiting(self._first_line() or self._queue.online)
        ):
            self.record_no_walk(now, Stop.TURN)
            return None
        self._log.history.begin_walk()
        line = self._first_line()
        if line is None:
            return None
        walk = self._walk(line, now, order)
        if walk.batch is None and walk.is_through and line is not self._queue.lines[-1]:
            walk = self._walk(self._queue.lines[-1], now, None)
        return walk.batch

    def room_for_first(self, now: float) -> RoomForFirst:
        """The running requests that must be retracted so that the first waiting request can be
        admitted.

        None if there is room, if retraction does not help, or if there are no classes. A request
        that was admitted because it was overdue is not retracted.
        """
        queue = self._queue
        classes = queue.classes
        line = queue.next_line
        if classes is None or line is not queue.online:
            return NO_ROOM
        order = line.order(now, queue.end)
        first = next(order, None)
        if first is None:
            return NO_ROOM
        victims = self._victims_of(first, classes, now)
        # With resumed requests, the pass asks the queue for a new order before it begins.
        if victims or line.resumed:
            return RoomForFirst(victims)
        return RoomForFirst([], chain((first,), order))

    def record_no_walk(self, now: float, stop: Stop) -> None:
        """Record that no request is looked at before the next step, if some wait."""
        if self._queue.next_line is not None:
            self._log.history.begin_walk()
            self._log.record_pass(now, stop)

    # Inside

    @property
    def _num_come(self) -> int:
        """The requests that have come, those that are blocked apart: they come when they are let
        pass."""
        return min(self._counters.num_requests, self._queue.end)

    def _first_line(self) -> WaitingLine | None:
        """The first line of the queue with something to compute; None if there is none."""
        queue = self._queue
        if self.chunked_req is None:
            return queue.next_line
        for line in queue.lines:
            if line.has_candidates(queue.end) or self._chunk_of(line) is not None:
                return line
        return None

    def _chunk_of(self, line: WaitingLine) -> Request | None:
        """The open chunk, if it belongs to this line."""
        chunk = self.chunked_req
        if chunk is None or self._queue.line_of(chunk) is not line:
            return None
        return chunk

    def _walk(self, line: WaitingLine, now: float, order: Iterator[Request] | None) -> LineWalk:
        """Admit requests of one line. Its open chunk goes first, even when the batch is full: it
        owns a row, which it releases only after its prompt is computed."""
        queue = self._queue
        end = queue.end
        chunk = self._chunk_of(line)
        if chunk is None:
            if not line.has_candidates(end):
                return NOBODY
            if self._has_no_room(line, now):
                return NOBODY_FITS
        decode_rows = self._rows_to_mix()
        adder = self._new_adder(line, decode_rows, now)
        sharing: PrefixSharing | None = None
        if chunk is not None:
            sharing = new_sharing(self._kv)
            sharing.picked(chunk)
            self._continue_chunk(chunk, adder, now)
        elif line.num_candidates(end) > 1:
            # A request alone computes no prefix twice.
            sharing = new_sharing(self._kv)
        picked = Picked([], is_through=True)
        if not line.is_full:
            order = order or line.order(now, end)
            picked = self._pick_waiting(line, adder, sharing, now, order)
        elif line.has_candidates(end):
            picked = Picked([], is_through=False)
            self._log.record_pass(now, Stop.FULL)
        if not adder.can_run:
            # An open chunk of a later line may be what was in the way.
            is_foreign = self.chunked_req is not None and chunk is None
            return LineWalk(None, is_through=picked.is_through or is_foreign)
        if picked.is_through and line is not queue.lines[-1]:
            self._record_background(now)
        turns = queue.background.turns
        if turns is not None:
            decode_rows = turns.beside(self._kv.columns, decode_rows, adder.can_run)
        num_computed = adder.input_tokens
        for request in picked.requests:
            num_computed -= self._admit(line, request, now)
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None, "two prompts are open"
            self.chunked_req = adder.new_chunked_req
            self._kv.columns.num_arrived[self.chunked_req.row] = self._num_come
        self._counters.num_prefilled_tokens += num_computed
        return LineWalk(self._planner.make_batch(adder.can_run, decode_rows), is_through=True)

    def _record_background(self, now: float) -> None:
        """Record why background requests wait, if some do."""
        if self._queue.lines[-1].has_candidates(self._queue.end):
            self._log.record_pass(now, Stop.ONLINE)

    def _victims_of(self, first: Request, classes: RequestClasses, now: float) -> list[Request]:
        """The running requests that must be retracted so that `first` can be admitted."""
        queue = self._queue
        rows = self._running.rows
        if self.chunked_req is not None:
            # The open chunk has the next step, so retracting another row would not help.
            rows = np.array([self.chunked_req.row], dtype=np.int32)
        rows = rows[classes.far_below(first, rows)]
        if not len(rows) or not self._hooks.may_run(first):
            return []
        hooks = self._hooks
        if hooks.batch_limits and hooks.why_not_batched(first, self._queue_walk([], now)):
            return []
        requests = self._kv.columns.requests[rows]
        below = [request for request in requests if not queue.is_overdue(request, now)]
        if self.chunked_req is not None:
            return below
        adder = self._new_adder(queue.online, NO_ROWS, now)
        victims = victims_for(
            first, below, self._kv, adder, self.new_token_ratio.current, classes.rank
        )
        if victims is not None:
            return victims
        # Without background requests it would run alone, and then it fits.
        are_all = len(queue.lines) > 1 and len(below) == len(self._running.rows)
        return below if are_all else []

    def _has_no_room(self, line: WaitingLine, now: float) -> bool:
        """Whether no request of a line with candidates can be admitted; then it is recorded."""
        if not line.is_full and self._kv.rows.num_free:
            return False
        line.look()
        self._log.record_pass(now, Stop.FULL if line.is_full else Stop.NO_ROW)
        line.is_full = True
        return True

    def _continue_chunk(self, request: Request, adder: PrefillAdder, now: float) -> None:
        self.chunked_req = adder.add_chunked_req(request)
        if adder.can_run:
            piece = f"{request.kv_len:,} to {request.extend_end:,} of {request.fill_len:,}"
            self._log.note(now, request, EventKind.CHUNK, f"computes {piece}")
        else:
            self._log.note(now, request, EventKind.STALLED, lacking(adder.shortage))

    def _new_adder(self, line: WaitingLine, decode_rows: IntArray, now: float) -> PrefillAdder:
        settings = self._settings
        kv = self._kv
        running_rows = self._running.rows
        mixes = len(decode_rows) > 0
        budget = self._pace.budget(self._waiting(line), mixes=mixes)
        pieces: Sequence[PieceBudget] = ()
        if self._hooks.piece_budgets:
            pieces = self._hooks.new_piece_budgets(budget)
        groups: Sequence[GroupBudget] = ()
        # The fraction of their output for which running requests are promised memory.
        ratio = self.new_token_ratio.current
        if line.resumed:
            first = next(line.order(now, self._queue.end), None)
            ratio = careful_ratio(ratio, 0 if first is None else first.retractions)
        mixed_kv = kv.room.decode_pages(decode_rows) * settings.page_size if mixes else 0
        if kv.groups:
            groups = kv.room.new_budgets(PassFacts(running_rows, ratio, mixed_kv))
        completions = None
        if not kv.cache.shares and can_simulate(settings):
            open_prompts = self.open_prompts()
            completions = CompletionBudget(kv, running_rows, ratio, open_prompts)
        return PrefillAdder(
            kv,
            reserved=expected_tokens(kv.columns, running_rows, ratio),
            max_prefill_tokens=settings.max_prefill_tokens,
            chunked_prefill_size=self._piece_len,
            is_alone=not len(running_rows) and self.chunked_req is None,
            mixed_tokens=kv.room.decode_tokens(decode_rows) if mixes else 0,
            mixed_kv=mixed_kv,
            budget=budget,
            groups=groups,
            pieces=pieces,
            completions=completions,
        )

    def _waiting(self, line: WaitingLine) -> Waiting:
        queue = self._queue
        num = line.num_candidates(queue.end)
        first = line.oldest(queue.end)
        chunk = self._chunk_of(line)
        if chunk is not None:
            num += 1
            first = chunk
        if first is None:
            return NOBODY_WAITS
        beside_background = False
        if len(queue.lines) > 1:
            num_background = queue.num_background + self._kv.columns.num_background
            beside_background = num_background > 0
        return Waiting(
            num,
            first.spec.num_before,
            is_background=first.spec.service.yields,
            beside_background=beside_background,
        )

    def _rows_to_mix(self) -> IntArray:
        """The decoding rows that join a prefill step, if this is enabled and memory allows."""
        settings = self._settings
        if not settings.mixed_chunk or self._piece_len is None:
            return NO_ROWS
        rows = self._kv.columns.unfinished(self._running.rows)
        if not len(rows):
            return NO_ROWS
        budget = min(self._piece_len, settings.max_prefill_tokens)
        if not self._kv.room.decode_fits(rows):
            return NO_ROWS
        if self._kv.room.decode_tokens(rows) + settings.page_size > budget:
            return NO_ROWS
        return rows

    def _pick_waiting(
        self,
        line: WaitingLine,
        adder: PrefillAdder,
        sharing: PrefixSharing | None,
        now: float,
        order: Iterator[Request],
    ) -> Picked:
        """Walk a line in its policy's order and pick requests, up to the first that does not
        fit."""
        picked: list[Request] = []
        walk: QueueWalk | None = None
        if self._hooks.batch_limits:
            walk = self._queue_walk(picked, now)
        num_seen = 0
        num_passed_over = 0
        for request in order:
            num_seen += 1
            self.seen.add(request.id)
            if len(picked) >= self._kv.rows.num_free:
                line.is_full = True
                self._log.record_pass(now, Stop.NO_ROW, request)
                return Picked(picked, is_through=False)
            if not self._hooks.may_run(request):
                self._note_unready(request)
                why = self._hooks.why_waits(request)
                self._pass_over(line, now, request, EventKind.WAITING_REASON, why)
                continue
            apart = "" if walk is None else self._hooks.why_not_batched(request, walk)
            if apart:
                self._pass_over(line, now, request, EventKind.WAITING_REASON, apart)
                continue
            self._kv.prefixes.match(request)
            if sharing is not None and sharing.defers(request):
                why = "another request of this step computes its prefix"
                self._pass_over(line, now, request, EventKind.DEFERRED, why)
                if sharing.num_deferred == sharing.MAX_DEFERRED:
                    self._log.record_pass(now, Stop.DEFERRED)
                    return Picked(picked, is_through=False)
                continue
            num_before = len(adder.can_run)
            result = adder.add_one_req(request, has_chunked_req=self.chunked_req is not None)
            was_picked = len(adder.can_run) > num_before
            if was_picked:
                picked.append(request)
                if sharing is not None:
                    sharing.picked(request)
            if result is AddResult.CONTINUE:
                continue
            if result is AddResult.PASSED_OVER:
                self._note_unready(request)
                self._pass_over(line, now, request, EventKind.WAITING_REASON, WAITS_FOR_ENCODER)
                num_passed_over += 1
                if num_passed_over < MAX_PASSED_OVER:
                    continue
                self._log.record_pass(now, Stop.ENCODER)
                return Picked(picked, is_through=False)
            if result is AddResult.NO_TOKEN:
                line.is_full = True
            self._log.record_stop(now, result, request, adder, was_picked=was_picked)
            return Picked(picked, is_through=False)
        if num_seen < line.num_candidates(self._queue.end):
            self._log.record_pass(now, Stop.POLICY)
        return Picked(picked, is_through=True)

    def _queue_walk(self, picked: list[Request], now: float) -> QueueWalk:
        self._num_queue_walks += 1
        return QueueWalk(self._num_queue_walks, now, picked, self._kv, self._queue.is_overdue)

    def _note_unready(self, request: Request) -> None:
        """A waiting request could not run if it were chosen."""
        if request.spec.num_before != self._num_come:
            request.spec = request.spec._replace(num_before=self._num_come)

    def _pass_over(
        self, line: WaitingLine, now: float, request: Request, kind: EventKind, why: str
    ) -> None:
        self._log.note(now, request, kind, why)
        follower = line.policy.follower
        if follower is not None:
            follower.passed_over(request)

    def _admit(self, line: WaitingLine, request: Request, now: float) -> int:
        """Give a picked request a row. Returns how many tokens of its first piece are copied, not
        computed."""
        cached_len = request.prefix.length
        self._kv.take_row(request)
        num_copied = 0
        if self._kv.copies is not None:
            num_copied = self._kv.copies.choose(request)
        trace = self._log.history.admitted(
            request.id,
            cached_len + num_copied,
            request.fill_len,
            request.extend_end,
            now,
            self._planner.num_steps,
        )
        if request.admitted_s < 0:
            request.admitted_s = now
            self._limits.drain.admitted(now)
            self._limits.deadlines.admitted(request)
            request.cached_tokens = cached_len + num_copied
            matched_len = request.cached_tokens
            if self._kv.groups:
                matched_len = self._kv.prefixes.matched_len(request)
            trace.reuse = Reuse(
                request.cached_tokens,
                request.reusable_len,
                matched_len,
                self._kv.cache.num_emptied,
                request.message.tenant,
            )
            self._counters.num_prompt_tokens += request.spec.prompt_len
            self._counters.num_cached_tokens += request.cached_tokens
        line.admit(request)
        request.state = RequestState.PREFILLING
        for feature in self._hooks.of(request):
            feature.enter_row(request)
        return num_copied


def lacking(shortage: Shortage | None) -> str:
    """Why an open prompt cannot continue."""
    assert shortage is not None, "a request was refused without a reason"
    needed = shortage.needed
    available = shortage.available
    match shortage.lack:
        case Lack.MEMORY | Lack.GROUP:
            words = (
                f"no {shortage.memory.what} to go on: {needed:,} tokens are needed, "
                f"{available:,} are available"
            )
            if shortage.lack is Lack.GROUP:
                return words
            free = shortage.free - shortage.evictable
            return f"{words} ({free:,} free and {shortage.evictable:,} evictable)"
        case Lack.ENCODER:
            return WAITS_FOR_ENCODER
        case Lack.TIME:
            return (
                "no time to go on: the next tokens of running requests are due; "
                f"it has {needed:,} to compute"
            )
        case _:
            return (
                f"the step has no tokens left to go on: {available:,} of the {needed:,} "
                "that it has to compute"
            )

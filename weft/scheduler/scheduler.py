"""The scheduler: which requests run in the next step, and what becomes of them.

Continuous batching: a request that ends leaves at once, a waiting one takes its place in the next step. Prompts go
before decoding (or with it, `mixed_chunk`), cut into chunks so that no step gets too long. When a decode step does not
fit in memory, requests are taken back to the queue; their output is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.grammar.protocol import NOT_FOLLOWED
from weft.memory.accounting.audit import audit
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import TOKEN_BYTES, NoPrefixCache, PrefixCache
from weft.memory.radix import RadixCache
from weft.memory.rows import RowTable
from weft.messages.replies import Finish, FinishReason, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.status import Stats
from weft.plan.step import Result
from weft.scheduler.admission import AddResult, Lack, PrefillAdder, PrefixSharing, Shortage
from weft.scheduler.batch import Batch, RunningBatch
from weft.scheduler.commit import commit
from weft.scheduler.counters import Counters
from weft.scheduler.feature import Feature, FeatureHooks, StepEffects
from weft.scheduler.history.request_history import Event, EventKind, RequestHistory, Stop
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits.deadlines import Deadlines
from weft.scheduler.limits.drain import Drain
from weft.scheduler.limits.refusal import QUEUE_IS_FULL, Refusal, refusal
from weft.scheduler.pace.pace import Pace
from weft.scheduler.planner import Planner
from weft.scheduler.policy import PolicyContext, make_policy
from weft.scheduler.preemption import Preemption
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.ratio import NewTokenRatio, expected_tokens
from weft.scheduler.request import NO_ROW, Columns, Request, RequestState, matching_ids, seed_of
from weft.scheduler.retraction import careful_ratio, retract_until_fits
from weft.scheduler.settings import SchedulerSettings

STOPS = {
    Lack.MEMORY: Stop.NO_TOKEN,
    Lack.TOKENS: Stop.BUDGET,
    Lack.TIME: Stop.TIME,
    Lack.OPEN_PROMPT: Stop.OPEN_PROMPT,
}


class Scheduler:
    def __init__(
        self,
        settings: SchedulerSettings,
        features: Sequence[Feature] = (),
    ) -> None:
        self.settings = settings
        page_size, num_rows = settings.page_size, settings.sized_for.max_running_requests
        cache: PrefixCache = (
            RadixCache(page_size) if settings.prefix_cache else NoPrefixCache(page_size)
        )
        self.columns = Columns(num_rows, settings.context_length)
        rows = RowTable(num_rows, settings.context_length, settings.max_running_requests)
        self.kv = KvMemory(rows, PageAllocator(settings.num_pages, page_size), cache, self.columns)
        self.counters = Counters()
        self.history = RequestHistory()
        self._now = 0.0  # as of the last call that told
        self.hooks = FeatureHooks(features)
        self._planner = Planner(self.kv, self.hooks)
        self._is_eos: BoolArray = np.zeros(settings.vocab_size, dtype=np.bool_)
        self._is_eos[list(settings.eos_token_ids)] = True
        self.max_len = min(settings.context_length, self.kv.capacity)

        self.requests: dict[int, Request] = {}  # every open request, by id
        self.running_batch = RunningBatch()
        self.pace = Pace(settings.max_step_s, page_size, self.columns, self.running_batch)
        self._context = PolicyContext(settings, self.columns, self.running_batch)
        self.waiting_queue = WaitingQueue(
            make_policy(settings.policy, self._context), cache, settings.aging_s
        )
        self._preemption = Preemption(
            self.waiting_queue, self.kv, self.running_batch, self.hooks, self._new_adder
        )
        self.last_batch: Batch | None = (
            None  # ran last; its prefills are not in the running batch yet
        )
        self.chunked_req: Request | None = None  # the one whose prompt is partly computed
        self.batch_is_full = False  # nothing can be admitted before something ends
        self.new_token_ratio = NewTokenRatio(settings.schedule_conservativeness)
        self.deadlines = Deadlines(max_queue_s=settings.max_queue_s, max_run_s=settings.max_run_s)
        self._drain = Drain()
        self._seen: set[int] = set()  # requests that the last pass over the queue has looked at
        self._output: StepOutput | None = None  # of the last result, until it is told
        self._finished: list[Finish] = []  # since the last output
        self._faults: list[
            Exception
        ] = []  # that were raised, and end nothing: for whoever reports them
        self.is_in_doubt = (
            False  # something was left half way: the books are to begin anew before the next step
        )

    # Requests come and go

    def add_request(
        self,
        message: GenerateRequest,
        now: float,
        refused: Refusal | None = None,
        *,
        first: bool = False,
    ) -> None:
        """Queue a request. One that was refused or can never run ends here with an error, as does who has to go when
        the queue overflows. With `first` it goes before all others, whatever the limits."""
        self._now = now
        if message.id in self.requests:
            self.counters.num_duplicates += 1
            return
        number = self.counters.num_requests
        self.counters.num_requests += 1
        prompt_len, num_waiting = len(message.input_ids) // TOKEN_BYTES, len(self.waiting_queue)
        self.history.arrived(
            message.id, message.rid, number, prompt_len, num_waiting, now, self.num_steps
        )
        refused = refused or refusal(message, self.settings, max_len=self.max_len)
        if refused is not None:
            self.history.finished(message.id, f"refused: {refused.message}", 0, now, self.num_steps)
            self._finished.append(
                Finish(
                    id=message.id, reason="error", message=refused.message, status=refused.status
                )
            )
            return
        sampling = message.sampling
        max_len = (
            self.max_len
            if sampling.max_new_tokens is None
            else prompt_len + sampling.max_new_tokens
        )
        seed = seed_of(self.settings.seed, number) if sampling.seed is None else sampling.seed
        request = Request(
            message,
            max_len=max_len,
            seed=seed,
            arrival_order=number,
            arrival_s=now,
            goes_first=first,
        )
        self._enter(request, message, first=first)
        if not first:
            self._end_overflow(request)
        if request.id in self.requests:
            for feature in self.hooks.of(request):
                feature.arrive(message)

    def _end_overflow(self, request: Request) -> None:
        """A request has joined the queue: end those that have to go because the queue is too long."""
        places = self.settings.max_queued_requests + self._rows_to_give
        for loser in self.waiting_queue.overflow(request, places, self.settings.max_queued_tokens):
            self.counters.num_queue_full += 1
            self._finish(loser, "error", message=QUEUE_IS_FULL.message, status=QUEUE_IS_FULL.status)

    @property
    def _rows_to_give(self) -> int:
        """Rows that the next pass gives to those that wait: so many are not going to stand in the queue."""
        gives_none = self.batch_is_full or self.waiting_queue.blocks_arrivals
        return 0 if gives_none else self.kv.rows.num_free

    def _enter(self, request: Request, message: GenerateRequest, *, first: bool) -> None:
        """Open a request: all of it, or, if anything raises, nothing."""
        join = self.waiting_queue.resume if first else self.waiting_queue.append
        try:
            join(request)
            self.deadlines.arrived(request, message.timeout_ms)
        except BaseException:
            if request in self.waiting_queue:
                self.waiting_queue.remove(request)
            self.deadlines.forget(request)
            raise
        self.requests[request.id] = request
        self.hooks.subscribe(message)

    def fail(self, id: int, message: str, status: int = 500) -> None:
        """End a request with an error, whether it is open or could not even be opened."""
        request = self.requests.get(id)
        if request is not None:
            self._finish(request, "error", message=message, status=status, keep=False)
            return
        if self.history.is_open(id):
            self.history.finished(id, f"error: {message}", 0, self._now, self.num_steps)
        self._finished.append(Finish(id=id, reason="error", message=message, status=status))

    def has_ended(self, id: int) -> bool:
        """Whether the final word on this request is among those that are still to be said."""
        return any(finish.id == id for finish in self._finished)

    def take_faults(self) -> list[Exception]:
        """What was raised since the last call when somebody was told of a request's end, or when all was computed
        anew. It has ended all the same, and everybody else was told."""
        faults, self._faults = self._faults, []
        return faults

    def abort(self, message: Abort) -> None:
        """End requests in whatever state they are. Unknown ones are ignored: they have just finished."""
        for id in matching_ids(self.requests, message):
            if id in self.requests:
                self._finish(
                    self.requests[id],
                    message.reason,
                    message=message.message,
                    status=message.status,
                )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        matched: int | None = None,
        message: str = "",
        status: int = 200,
        keep: bool = True,
    ) -> None:
        """Give up all that a request holds and say its final word. `keep` leaves what it computed to the cache."""
        has_row = request.row != NO_ROW
        known_len = int(self.columns.known_len[request.row]) if has_row else request.fill_len
        num_output = known_len - request.prompt_len
        try:
            if has_row:
                self._release_row(request, keep=keep)
            else:
                self._tell(self.waiting_queue.remove, request)
        finally:  # whatever is left of it in the books then, it has ended
            self._say_end(request, reason, num_output, matched, message, status)

    def _say_end(
        self,
        request: Request,
        reason: FinishReason,
        num_output: int,
        matched: int | None,
        message: str,
        status: int,
    ) -> None:
        """The final word on a request. It is said whatever raises on the way."""
        request.state = RequestState.FINISHED
        del self.requests[request.id]
        features = self.hooks.unsubscribe(request)
        self.counters.num_aborted += reason == "abort"
        prefill_s = 0.0
        try:
            for feature in features:
                self._tell(feature.end, request, reason, self._now, self.kv)
            detail = f"{reason}, {num_output:,} tokens" + (f": {message}" if message else "")
            prefill_s = self.history.finished(
                request.id, detail, num_output, self._now, self.num_steps
            ).prefill_s
        finally:
            self._finished.append(
                Finish(
                    id=request.id,
                    reason=reason,
                    matched=matched,
                    message=message,
                    status=status,
                    prompt_tokens=request.spec.prompt_len,
                    completion_tokens=num_output,
                    cached_tokens=request.cached_tokens,
                    queue_s=max(request.admitted_s - request.spec.arrival_s, 0.0),
                    prefill_s=prefill_s,
                    retractions=request.retractions,
                    retry_after_s=self._retry_after_s(status),
                )
            )

    def _retry_after_s(self, status: int) -> int:
        """When to come again, for those whom the queue has refused or kept for too long; 0: nothing is said of it."""
        return self._drain.retry_after_s(len(self.waiting_queue), self._now) if status == 503 else 0

    def _tell(self, hook: Callable[..., None], *what: object, **more: object) -> None:
        """Tell of an end. What is raised is kept for `take_faults`: an end may not be left half way."""
        try:
            hook(*what, **more)
        except Exception as exc:
            self._faults.append(exc)
            self.is_in_doubt = True

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is done within moves pages: if it is left half way, the books are in doubt."""
        try:
            yield
        except BaseException:
            self.is_in_doubt = True
            raise

    def _release_row(self, request: Request, *, keep: bool = True) -> None:
        """Take a request out of its row, and so out of the batch, with all tokens that are known."""
        with self._whole():
            request.packed = self.columns.packed(
                request.row, int(self.columns.known_len[request.row])
            )
            for feature in self.hooks.of(request):
                self._tell(feature.release, request)
            self._tell(self.waiting_queue.left, request)
            if request is self.chunked_req:
                self.chunked_req = None
            self.running_batch.remove(request.row)
            self.kv.release(request, keep=keep)
            self.batch_is_full = False

    # The next step

    def get_next_batch_to_run(self, now: float, *, in_flight: bool) -> Batch | None:
        """Choose the next step and prepare it, or None if there is nothing to run.

        With `in_flight` (the result of the last step is not known yet) None may also mean that the next step depends on
        that result: commit it, then ask again.
        """
        self._seen.clear()
        self.expire(now)
        self.merge_last_batch()
        if victims := self._preemption.victims(now, self.chunked_req, self.new_token_ratio.current):
            if in_flight:
                self._note_no_walk(Stop.ROOM)
                return None
            for victim in victims:
                self.retract(victim, "a request of a far higher priority takes its place")
        if self.pace.decode_is_due():
            self._note_no_walk(Stop.TURN)
            batch = None
        else:
            batch = self.get_new_batch_prefill()
        if batch is None:
            batch = self.update_running_batch(in_flight=in_flight)
        self.last_batch = batch
        if batch is not None:
            self.pace.planned(batch)
            self.counters.num_steps += 1
            self.counters.num_prefill_steps += bool(batch.prefills)
        return batch

    def expire(self, now: float) -> None:
        """End the requests whose time is over."""
        self._now = now
        for late in self.deadlines.expired(self.requests, now):
            self._finish(late.request, "abort", message=late.message, status=late.status)

    def merge_last_batch(self) -> None:
        """What the last step prefilled goes into the cache; prompts that are done join the running batch."""
        if self.last_batch is None or not self.last_batch.prefills:
            self.last_batch = None
            return
        joining = []
        with self._whole():
            for request in self.last_batch.prefills:
                if request.state is not RequestState.PREFILLING:
                    continue  # it has ended meanwhile
                self.kv.share(request)
                is_open = request is self.chunked_req
                assert request.is_prefilled != is_open, (
                    f"{request.rid} has {request.kv_len} of its {request.fill_len} tokens, "
                    f"and is {'' if is_open else 'not '}the open chunk"
                )
                if request.is_prefilled:
                    request.state = RequestState.DECODING
                    joining.append(request.row)
            self.running_batch.merge(joining)
            self.last_batch = None

    def get_new_batch_prefill(self) -> Batch | None:
        """Admit waiting requests as far as memory and the budgets of a step allow. None if nothing can run.

        The open chunk goes first, also when the batch is full: it holds its row, and only its progress gives it back.
        """
        self.history.begin_walk()
        if self.chunked_req is None:
            if not self.waiting_queue.has_candidates:
                return None
            if self.batch_is_full or not self.kv.rows.num_free:
                self._record_pass(Stop.FULL if self.batch_is_full else Stop.NO_ROW)
                self.batch_is_full = True
                return None
        decode_rows = self._rows_to_mix()
        adder = self._new_adder(decode_rows)
        sharing = PrefixSharing(self.kv.cache)
        if self.chunked_req is not None:
            sharing.picked(self.chunked_req)
            chunked, self.chunked_req = self.chunked_req, adder.add_chunked_req(self.chunked_req)
            if adder.can_run:
                self._note(chunked, EventKind.CHUNK, _piece(chunked))
            else:
                self._note(chunked, EventKind.STALLED, lacking(adder.shortage))
        picked = []
        if not self.batch_is_full:
            picked = self._pick_waiting(adder, sharing)
        elif self.waiting_queue.has_candidates:
            self._record_pass(Stop.FULL)
        if not adder.can_run:
            return None
        for request in picked:
            self._admit(request)
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None, "two prompts are open"
            self.chunked_req = adder.new_chunked_req
        self.counters.num_prefilled_tokens += adder.input_tokens
        return self._planner.make_batch(adder.can_run, decode_rows)

    def _new_adder(self, decode_rows: IntArray) -> PrefillAdder:
        settings = self.settings
        return PrefillAdder(
            self.kv,
            reserved=self._expected_tokens(),
            mixed_tokens=self.kv.decode_tokens(decode_rows),
            mixed_kv=self.kv.decode_pages(decode_rows) * settings.page_size,
            max_prefill_tokens=settings.max_prefill_tokens,
            chunked_prefill_size=settings.chunked_prefill_size,
            is_alone=not len(self.running_batch) and self.chunked_req is None,
            budget=self.pace.budget(mixes=len(decode_rows) > 0),
        )

    def _pick_waiting(self, adder: PrefillAdder, sharing: PrefixSharing) -> list[Request]:
        """Walk the queue in the policy's order and add what fits, up to the first that does not."""
        picked: list[Request] = []
        num_seen = 0
        for request in self.waiting_queue.order(self._now):
            num_seen += 1
            self._seen.add(request.id)
            if len(picked) >= self.kv.rows.num_free:
                self.batch_is_full = True
                self._record_pass(Stop.NO_ROW, request)
                break
            if not self.hooks.may_run(request):
                self._note(request, EventKind.WAITING_REASON, "not ready yet")
                self.waiting_queue.passed_over(request)
                continue
            self.kv.match(request)
            if sharing.defers(request):
                self._note(
                    request, EventKind.DEFERRED, "another request of this step computes its prefix"
                )
                self.waiting_queue.passed_over(request)
                if sharing.num_deferred == sharing.MAX_DEFERRED:
                    self._record_pass(Stop.DEFERRED)
                    break
                continue
            num_before = len(adder.can_run)
            result = adder.add_one_req(request, has_chunked_req=self.chunked_req is not None)
            if len(adder.can_run) > num_before:
                picked.append(request)
                sharing.picked(request)
            if result is AddResult.NO_TOKEN:
                self.batch_is_full = True
            if result is not AddResult.CONTINUE:
                self._note_stop(result, request, adder, was_picked=len(adder.can_run) > num_before)
                break
        else:  # the order has come to its end
            if num_seen < self.waiting_queue.num_candidates:
                self._record_pass(Stop.POLICY)
        return picked

    def _note_stop(
        self, result: AddResult, request: Request, adder: PrefillAdder, *, was_picked: bool
    ) -> None:
        """Write down why the walk over the queue ended, in the numbers of the moment at which it did."""
        if was_picked:
            self._record_pass(Stop.BUDGET if result is AddResult.OTHER else Stop.NO_TOKEN)
            return
        shortage = adder.shortage
        assert shortage is not None, "a request was refused without a reason"
        self._record_pass(STOPS[shortage.lack], request, shortage)

    def _admit(self, request: Request) -> None:
        """Give a picked request its row."""
        self.history.admitted(
            request.id,
            request.cached_len,
            request.fill_len,
            _piece(request),
            self._now,
            self.num_steps,
        )
        if request.admitted_s < 0:
            request.admitted_s = self._now
            self._drain.admitted(self._now)
            self.deadlines.admitted(request)
            request.cached_tokens = request.cached_len
            self.counters.num_prompt_tokens += request.prompt_len
            self.counters.num_cached_tokens += request.cached_len
        self.kv.take_row(request)
        self.waiting_queue.admit(request)
        request.state = RequestState.PREFILLING
        for feature in self.hooks.of(request):
            feature.enter_row(request)

    def _expected_tokens(self) -> float:
        """Tokens that the running requests are expected to generate yet."""
        ratio = careful_ratio(
            self.new_token_ratio.current, self.waiting_queue.retractions_of_first(self._now)
        )
        return expected_tokens(self.columns, self.running_batch.rows, ratio)

    def _unfinished(self, rows: IntArray) -> IntArray:
        """Rows without those that will end by length with the token that is being sampled."""
        return rows[self.columns.seq_len[rows] < self.columns.max_len[rows]]

    def _rows_to_mix(self) -> IntArray:
        """The decoding rows that join a prefill step, if they are to and memory allows."""
        if self.settings.mixed_chunk and self.settings.chunked_prefill_size is not None:
            rows = self._unfinished(self.running_batch.rows)
            budget = min(self.settings.chunked_prefill_size, self.settings.max_prefill_tokens)
            if (
                self._decode_fits(rows)
                and self.kv.decode_tokens(rows) + self.settings.page_size <= budget
            ):
                return rows
        return self.running_batch.rows[:0]

    def _decode_fits(self, rows: IntArray) -> bool:
        return self.kv.decode_pages(rows) * self.settings.page_size <= self.kv.available

    def update_running_batch(self, *, in_flight: bool) -> Batch | None:
        """The next decode step. Retracts if it does not fit in memory, once no result is outstanding."""
        rows = self._unfinished(self.running_batch.rows)
        if not len(rows):
            if not len(self.running_batch):
                self.new_token_ratio.reset()
                self.batch_is_full = False  # nothing that could end would open admission again
            return None
        if self._decode_fits(rows):
            self.new_token_ratio.decay()
        elif in_flight:
            return None
        else:
            rows = self._retract_until_fits(rows)
        return self._planner.make_batch([], rows)

    def _retract_until_fits(self, rows: IntArray) -> IntArray:
        """Take requests back to the queue until the others can decode for a while. Returns the others.

        If the one that is kept still lacks memory, the open chunk holds it and goes back too.
        """
        kept = retract_until_fits(self.kv, rows, self.waiting_queue.rank, self.retract)
        if not self._decode_fits(kept):
            assert self.chunked_req is not None, "a request that fits alone has no memory"
            self.retract(self.chunked_req)
        self.new_token_ratio.learn(self.columns, kept)
        return kept

    def retract(self, request: Request, why: str = "no KV memory for the next step") -> None:
        """Retract: what is computed goes into the cache, so that resuming is a hit while space lasts; the output so far
        becomes part of what is prefilled."""
        known = int(self.columns.known_len[request.row])
        detail = f"{why}; {known:,} tokens to be found again"
        self.history.retracted(request.id, detail, self._now, self.num_steps)
        self._release_row(request)
        request.fill_len = known
        request.state = RequestState.WAITING
        request.retractions += 1
        self.counters.num_retractions += 1
        self.waiting_queue.resume(request)

    # Results

    def process_batch_result(
        self, batch: Batch, result: Result, now: float | None = None
    ) -> StepOutput | None:
        """Take in what a step sampled. Returns the reply to the front, if there is something to tell."""
        self._now = self._now if now is None else now
        effects = StepEffects()
        for take in self.hooks.commit:
            take(batch, self.columns, result, effects)
        outcome = commit(self.columns, batch, result, self._is_eos, effects.ends, effects.forced)
        # From here on the tokens are among those that are known, so they must be told whatever raises.
        self._output = StepOutput(
            ids=outcome.ids.tobytes(),
            tokens=outcome.tokens.tobytes(),
            logprobs=effects.logprobs,
            aux=effects.aux,
        )
        self.counters.num_generated_tokens += len(outcome.tokens)
        for request in batch.prefills:
            if request.row != NO_ROW and self.columns.num_output(request.row):
                self.history.first_token(request.id, self._now, batch.plan.step)
        for end in outcome.ends:
            request = self.columns.requests[end.row]
            if end.reason == "error":
                status = (
                    400 if end.message.startswith(NOT_FOLLOWED) else 500
                )  # a grammar is its user's
                self._tell(
                    self._finish, request, "error", message=end.message, status=status, keep=False
                )
            else:
                self._tell(self._finish, request, end.reason, matched=end.matched)
        return self.take_output()

    def take_output(self) -> StepOutput | None:
        """What is to be told: tokens of the last result, and final words, also those that no result brought (of refused
        and aborted requests)."""
        output, self._output = self._output or StepOutput(), None
        finished, self._finished = self._finished, []
        if finished:
            output = msgspec.structs.replace(output, finished=finished)
        return output if output.ids or output.finished or output.aux else None

    # Faults

    def process_batch_failure(self, batch: Batch, message: str) -> None:
        """A step failed on the device: its requests end with an error. No step is in flight."""
        self.recompute(self.open_ids(batch), message, "a step failed on the device")

    def open_ids(self, batch: Batch) -> set[int]:
        """The requests of a batch that are still open."""
        is_live = self.columns.epoch[batch.rows] == batch.epochs
        return set(self.columns.ids[batch.rows[is_live]].tolist())

    def suspects(self) -> set[int]:
        """Whom to end after a fault in planning: those for whom it is not the first.

        A fault that goes with a request would come again and again, so nobody is planned for a third time. Those are
        counted that have a row or were looked at in the last pass; all, if there are none.
        """
        concerned = [
            one for one in self.requests.values() if one.row != NO_ROW or one.id in self._seen
        ]
        suspects = set()
        for request in concerned or self.requests.values():
            request.num_faults += 1
            if request.num_faults > 1:
                suspects.add(request.id)
        return suspects

    def recompute(
        self, failed: set[int], message: str, why: str, *, in_doubt: bool = False
    ) -> None:
        """Trust nothing that was computed: end the requests with the ids `failed` with an error, compute others anew.

        The books of memory begin anew, whatever stood in them; `in_doubt`: so does the queue, and its policy forgets
        what it has seen. If anything raises on the way, all is done again in that manner. No step is in flight.
        """
        try:
            self._recompute(failed, message, why, in_doubt=in_doubt)
        except Exception as exc:
            self._faults.append(exc)
            self._recompute(failed, message, why, in_doubt=True)

    def _recompute(self, failed: set[int], message: str, why: str, *, in_doubt: bool) -> None:
        """May be called again where it was left by an exception: until the rows are reset, each request's tokens are
        where they were, and then in `Request.packed`."""
        self.last_batch = None
        self.chunked_req = None
        self.batch_is_full = False
        with_row = [request for request in self.requests.values() if request.row != NO_ROW]
        for request in with_row:
            request.packed = self.kv.known_tokens(request)
        for request in with_row:
            for feature in self.hooks.of(request):
                self._tell(feature.release, request)
            if not in_doubt:
                self.waiting_queue.left(request)
        if in_doubt:
            self.waiting_queue.stop_index()  # it is made anew below
        self.running_batch.reset()
        self.kv.reset()
        for request in self.requests.values():
            request.forget_kv()
        if in_doubt:
            policy = make_policy(self.settings.policy, self._context)
            self.waiting_queue.begin_anew(policy, self.requests.values())
        else:
            for request in with_row:
                self.waiting_queue.resume(request)
        self.is_in_doubt = False
        for id in sorted(failed & self.requests.keys()):
            self._finish(self.requests[id], "error", message=message, status=500)
        for request in with_row:
            if request.id in self.requests:
                self.history.retracted(
                    request.id, f"{why}: all is computed anew", self._now, self.num_steps
                )

    # Looking on

    def _note(self, request: Request, kind: EventKind, detail: str) -> None:
        self.history.note(request.id, Event(self._now, self.num_steps, kind, detail))

    def _record_pass(
        self, stop: Stop, at: Request | None = None, shortage: Shortage | None = None
    ) -> None:
        """The walk over the queue ends, for what the request `at` lacks, if there is one."""
        id = -1 if at is None else at.id
        if shortage is None:
            self.history.record_pass(self._now, self.num_steps, stop, id)
            return
        self.history.record_pass(
            self._now,
            self.num_steps,
            stop,
            id,
            needed=shortage.needed,
            available=shortage.available,
            free=shortage.free,
        )

    def _note_no_walk(self, stop: Stop) -> None:
        """Nobody looks at the queue before the next step, if somebody stands in it."""
        if self.waiting_queue.has_candidates:
            self.history.begin_walk()
            self._record_pass(stop)

    def note_device_is_busy(self) -> None:
        """No step is planned, for the device does something else, or its memory is released."""
        self._note_no_walk(Stop.DEVICE)

    @property
    def has_work(self) -> bool:
        """Whether a request is open, or a final word is still to be said."""
        return bool(self.requests or self._finished or self._output)

    @property
    def num_steps(self) -> int:
        """Steps that have been planned: the number of the next one."""
        return self._planner.num_steps

    def set_policy(self, name: str) -> None:
        """Order the waiting requests by this policy from now on. Raises UnknownPolicy."""
        settings = replace(self.settings, policy=name)
        self.waiting_queue.use(make_policy(name, self._context))
        self.settings = settings
        self.batch_is_full = False  # another first one may fit

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Only while no request has a row."""
        if len(self.requests) > len(self.waiting_queue):
            return False
        with self._whole():
            self.kv.reset_cache()
        return True

    def stats(self) -> Stats:
        kv, counters, page_size = self.kv, self.counters, self.settings.page_size
        evictable, held = kv.cache.evictable_pages * page_size, kv.cache.pinned_pages * page_size
        return Stats(
            num_running=len(self.requests) - len(self.waiting_queue),
            num_waiting=len(self.waiting_queue),
            num_waiting_tokens=self.waiting_queue.num_tokens,
            kv_tokens=kv.capacity,
            kv_used=kv.capacity - kv.available,
            kv_evictable=evictable,
            kv_held=held,
            new_token_ratio=self.new_token_ratio.current,
            batch_is_full=self.batch_is_full,
            total_evicted_tokens=kv.cache.total_evicted_pages * page_size,
            kv_quarantined=len(kv.allocator.quarantined) * page_size,
            **counters.totals(),
        )

    def audit(self) -> None:
        """Check the books: every page has one owner. Raises AccountingError. Cost: proportional to the pool."""
        audit(self.kv.allocator, self.kv.cache, self.owned_pages())
        assert not self.kv.imbalance, f"the sum of all pages is off by {self.kv.imbalance}"

    def owned_pages(self) -> dict[str, IntArray]:
        """The pages that each request with a row owns by itself, by its name."""
        requests = [request for request in self.requests.values() if request.row != NO_ROW]
        return {
            f"{request.rid} (request {request.id})": self.kv.owned_pages(request)
            for request in requests
        }


def lacking(shortage: Shortage | None) -> str:
    """Why an open prompt does not go on."""
    assert shortage is not None, "a request was refused without a reason"
    needed, available = shortage.needed, shortage.available
    match shortage.lack:
        case Lack.MEMORY:
            return (
                f"no KV memory to go on: {needed:,} tokens are needed, {available:,} are available"
            )
        case Lack.TIME:
            return f"no time to go on: the next tokens of running requests are due; it has {needed:,} to compute"
        case _:
            return f"the step has no tokens left to go on: {available:,} of the {needed:,} that it has to compute"


def _piece(request: Request) -> str:
    """The part of its prompt that the planned step computes."""
    return f"computes {request.kv_len:,} to {request.extend_end:,} of {request.fill_len:,}"

"""The scheduler: which requests run in the next step, and what becomes of them.

Continuous batching: a request that ends leaves at once, a waiting one takes its place in the next step. Prompts go
before decoding (or with it, `mixed_chunk`), cut into chunks so that no step gets too long. When a decode step does not
fit in memory, requests are taken back to the queue; their output is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weft.executor.plan import BoolArray, IntArray, Result
from weft.memory.accounting.audit import audit
from weft.memory.allocator import PageAllocator
from weft.memory.prefix_cache import TOKEN_BYTES, NoPrefixCache, PrefixCache
from weft.memory.radix import RadixCache
from weft.memory.rows import RowTable
from weft.messages.control import Stats
from weft.messages.replies import Finish, FinishReason, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.scheduler.admission import CLIP_MAX_NEW_TOKENS, AddResult, PrefillAdder
from weft.scheduler.batch import Batch, RunningBatch
from weft.scheduler.commit import commit
from weft.scheduler.events import Diary, Event, EventKind, Stop
from weft.scheduler.kv import KvMemory
from weft.scheduler.part import Moments, Part, StepReplies, Verdict
from weft.scheduler.planner import Planner
from weft.scheduler.policy import POLICIES, PrefixSharing
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.ratio import RETRACT_DECODE_STEPS, NewTokenRatio
from weft.scheduler.request import NO_ROW, Columns, Request, RequestState
from weft.scheduler.settings import SchedulerSettings


class Scheduler:
    def __init__(self, settings: SchedulerSettings, parts: Sequence[Part] = ()) -> None:
        self.settings = settings
        page_size, num_rows = settings.page_size, settings.max_running_requests
        cache: PrefixCache = RadixCache(page_size) if settings.prefix_cache else NoPrefixCache(page_size)
        self.columns = Columns(num_rows, settings.context_length)
        rows = RowTable(num_rows, settings.context_length)
        self.kv = KvMemory(rows, PageAllocator(settings.num_pages, page_size), cache, self.columns)
        self.counters = Counters()
        self.diary = Diary()
        self._now = 0.0  # as of the last call that told
        self._moments = Moments(parts)
        self._planner = Planner(self.kv, self._moments)
        self._policy = POLICIES[settings.policy]
        self._is_eos: BoolArray = np.zeros(settings.vocab_size, dtype=np.bool_)
        self._is_eos[list(settings.eos_token_ids)] = True
        self.max_len = min(settings.context_length, self.kv.capacity)

        self.requests: dict[int, Request] = {}  # every open request, by id
        self.waiting_queue = WaitingQueue()
        self.running_batch = RunningBatch()
        self.last_batch: Batch | None = None  # ran last; its prefills are not in the running batch yet
        self.chunked_req: Request | None = None  # the one whose prompt is partly computed
        self.batch_is_full = False  # nothing can be admitted before something ends
        self.new_token_ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._finished: list[Finish] = []  # since the last output

    # Requests come and go

    def add_request(self, message: GenerateRequest, now: float) -> None:
        """Queue a request. One that can never run, or finds the queue full, ends here with an error."""
        self._now = now
        if message.id in self.requests:
            self.counters.num_refused += 1
            return
        number = self.counters.num_requests
        self.counters.num_requests += 1
        problem, status = self._problem(message)
        self._note(message, EventKind.ARRIVED, f"{len(message.input_ids) // TOKEN_BYTES:,} prompt tokens")
        if problem:
            self._note(message, EventKind.FINISHED, f"refused: {problem}")
            self._finished.append(Finish(id=message.id, reason="error", message=problem, status=status))
            return
        sampling, prompt_len = message.sampling, len(message.input_ids) // TOKEN_BYTES
        max_len = self.max_len if sampling.max_new_tokens is None else prompt_len + sampling.max_new_tokens
        seed = _mix(self.settings.seed, number) if sampling.seed is None else sampling.seed
        request = Request(message, max_len=max_len, seed=seed, arrival=number, arrival_s=now)
        self.requests[request.id] = request
        self.waiting_queue.append(request)

    def abort(self, message: Abort) -> None:
        """End requests in whatever state they are. Unknown ids are ignored: they have just finished."""
        for id in list(self.requests) if message.all else message.ids:
            request = self.requests.get(id)
            if request is not None:
                self._finish(request, "abort", message=message.message)

    def _problem(self, message: GenerateRequest) -> tuple[str, int]:
        """Why a request cannot be taken and the HTTP status that says so, or an empty string."""
        prompt = np.frombuffer(message.input_ids[: len(message.input_ids) // 4 * 4], dtype=np.int32)
        if not len(prompt):
            return "the prompt is empty", 400
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.settings.vocab_size:
            bad = low if low < 0 else high
            return f"the prompt has token id {bad}; 0 to {self.settings.vocab_size - 1:,} are allowed", 400
        new = message.sampling.max_new_tokens or 1
        if len(prompt) + new > self.max_len:
            return (
                f"the prompt has {len(prompt):,} tokens and {new:,} are to be generated; "
                f"together at most {self.max_len:,} fit",
                400,
            )
        if len(self.waiting_queue) >= self.settings.max_queued_requests:
            return "The request queue is full.", 503
        return "", 200

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
        if request.row == NO_ROW:
            self.waiting_queue.remove(request)
            num_output = request.fill_len - request.prompt_len
        else:
            num_output = self.columns.num_output(request.row)
            self._leave(request, keep=keep)
        request.state = RequestState.FINISHED
        del self.requests[request.id]
        self._note(
            request, EventKind.FINISHED, f"{reason}, {num_output:,} tokens" + (f": {message}" if message else "")
        )
        self.counters.num_aborted += reason == "abort"
        self._finished.append(
            Finish(
                id=request.id,
                reason=reason,
                matched=matched,
                message=message,
                status=status,
                prompt_tokens=request.prompt_len,
                completion_tokens=num_output,
                cached_tokens=request.cached_tokens,
                queue_s=max(request.admitted_s - request.arrival_s, 0.0),
                retractions=request.retractions,
            )
        )

    def _leave(self, request: Request, *, keep: bool = True) -> None:
        """Take a request out of its row, and so out of the batch."""
        for release in self._moments.release:
            release(request)
        if request is self.chunked_req:
            self.chunked_req = None
        self.running_batch.filter(np.array([request.row], dtype=np.int32))
        self.kv.release(request, keep=keep)
        self.batch_is_full = False

    # The next step

    def get_next_batch_to_run(self, now: float, *, in_flight: bool) -> Batch | None:
        """Choose the next step and prepare it, or None if there is nothing to run.

        With `in_flight` (the result of the last step is not known yet) None may also mean that the next step depends on
        that result: commit it, then ask again.
        """
        self._now = now
        self._merge_last_batch()
        batch = self.get_new_batch_prefill()
        if batch is None:
            batch = self.update_running_batch(in_flight=in_flight)
        self.last_batch = batch
        if batch is not None:
            self.counters.num_steps += 1
            self.counters.num_prefill_steps += bool(batch.prefills)
        return batch

    def _merge_last_batch(self) -> None:
        """What the last step prefilled goes into the cache; prompts that are done join the running batch."""
        if self.last_batch is None:
            return
        joining = []
        for request in self.last_batch.prefills:
            if request.state is not RequestState.PREFILLING:
                continue  # it has ended meanwhile
            self.kv.share(request)
            if request is not self.chunked_req:
                request.state = RequestState.DECODING
                joining.append(request.row)
        self.running_batch.merge(joining)
        self.last_batch = None

    def get_new_batch_prefill(self) -> Batch | None:
        """Admit waiting requests as far as memory and the budgets of a step allow. None if nothing can run.

        The open chunk goes first, also when the batch is full: it holds its row, and only its progress gives it back.
        """
        if self.chunked_req is None:
            if not self.waiting_queue:
                return None
            if self.batch_is_full or not self.kv.rows.num_free:
                self._note_pass(Stop.FULL if self.batch_is_full else Stop.NO_ROW)
                self.batch_is_full = True
                return None
        decode_rows = self._rows_to_mix()
        adder = self._new_adder(decode_rows)
        sharing = PrefixSharing(self.kv.cache)
        if self.chunked_req is not None:
            sharing.picked(self.chunked_req)
            chunked, self.chunked_req = self.chunked_req, adder.add_chunked_req(self.chunked_req)
            self._note(chunked, EventKind.CHUNK, _piece(chunked) if adder.can_run else "no KV memory to go on")
        picked = self._pick_waiting(adder, sharing) if not self.batch_is_full else []
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
            mixed_tokens=len(decode_rows),
            mixed_kv=self.kv.decode_pages(decode_rows) * settings.page_size,
            max_prefill_tokens=settings.max_prefill_tokens,
            chunked_prefill_size=settings.chunked_prefill_size,
            is_alone=not len(self.running_batch) and self.chunked_req is None,
        )

    def _pick_waiting(self, adder: PrefillAdder, sharing: PrefixSharing) -> list[Request]:
        """Walk the queue in the policy's order and add what fits, up to the first that does not."""
        picked: list[Request] = []
        for request in self._policy(self.waiting_queue, self.kv.cache):
            if len(picked) >= self.kv.rows.num_free:
                self.batch_is_full = True
                self._note_pass(Stop.NO_ROW, request)
                break
            if any(admit(request) is Verdict.WAIT for admit in self._moments.admit):
                self._note(request, EventKind.HELD, "not ready yet")
                continue
            self.kv.match(request)
            if sharing.defers(request):
                self._note(request, EventKind.DEFERRED, "another request of this step computes its prefix")
                continue
            num_before = len(adder.can_run)
            result = adder.add_one_req(request, has_chunked_req=self.chunked_req is not None)
            if len(adder.can_run) > num_before:
                picked.append(request)
                sharing.picked(request)
            if result is AddResult.NO_TOKEN:
                # Full only if something can be served: else admission would stay shut for ever.
                self.batch_is_full = bool(adder.can_run) or len(self.running_batch) > 0
            if result is not AddResult.CONTINUE:
                self._note_stop(result, request, adder, was_picked=len(adder.can_run) > num_before)
                break
        return picked

    def _note_stop(self, result: AddResult, request: Request, adder: PrefillAdder, *, was_picked: bool) -> None:
        """Write down why the walk over the queue ended."""
        if was_picked:
            self._note_pass(Stop.BUDGET if result is AddResult.OTHER else Stop.NO_TOKEN)
        elif result is AddResult.OTHER:
            self._note_pass(Stop.BUDGET, request)
        else:
            needed = adder.needed_tokens(request)
            self._note_pass(Stop.NO_TOKEN, request, needed=needed, available=int(adder.rem_total_tokens))

    def _admit(self, request: Request) -> None:
        """Give a picked request its row."""
        self.waiting_queue.remove(request)
        self._note(request, EventKind.ADMITTED, f"{request.cached_len:,} tokens cached, {_piece(request)}")
        if request.admitted_s < 0:
            request.admitted_s = self._now
            request.cached_tokens = request.cached_len
            self.counters.num_prompt_tokens += request.prompt_len
            self.counters.num_cached_tokens += request.cached_len
        self.kv.take_row(request)
        request.state = RequestState.PREFILLING

    def _expected_tokens(self) -> float:
        """Tokens that the running requests are expected to generate yet. One that ignores EOS will go to its end."""
        columns, rows = self.columns, self.running_batch.rows
        left = np.minimum(columns.max_len[rows] - columns.seq_len[rows], CLIP_MAX_NEW_TOKENS)
        ratio = np.where(columns.stops_at_eos[rows], self.new_token_ratio.current, 1.0)
        return float(left @ ratio)

    def _unfinished(self, rows: IntArray) -> IntArray:
        """Rows without those that will end by length with the token that is being sampled."""
        return rows[self.columns.seq_len[rows] < self.columns.max_len[rows]]

    def _rows_to_mix(self) -> IntArray:
        """The decoding rows that join a prefill step, if they are to and memory allows."""
        if self.settings.mixed_chunk and self.settings.chunked_prefill_size is not None:
            rows = self._unfinished(self.running_batch.rows)
            budget = min(self.settings.chunked_prefill_size, self.settings.max_prefill_tokens)
            if self._decode_fits(rows) and len(rows) + self.settings.page_size <= budget:
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
                self.batch_is_full = False
            return None
        if self._decode_fits(rows):
            self.new_token_ratio.decay()
        elif in_flight:
            return None
        else:
            rows = self._retract(rows)
        return self._planner.make_batch([], rows)

    def _retract(self, rows: IntArray) -> IntArray:
        """Take requests back to the queue until the others can decode for a while. Returns the others.

        The one with the longest output stays; among equals the one with the shortest prompt. If it still lacks memory,
        the open chunk holds it and goes back too.
        """
        columns = self.columns
        num_output = columns.known_len[rows] - columns.prompt_len[rows]
        order = np.lexsort((columns.prompt_len[rows], -num_output))
        num_kept = len(rows)
        while num_kept > 1 and (num_kept == len(rows) or not self._has_room(rows[order[:num_kept]])):
            num_kept -= 1
            self._take_back(columns.requests[rows[order[num_kept]]])
        kept: IntArray = rows[np.sort(order[:num_kept])]
        if not self._decode_fits(kept):
            assert self.chunked_req is not None, "a request that fits alone has no memory"
            self._take_back(self.chunked_req)
        self.new_token_ratio.raise_after_retraction(
            num_decoded=int((columns.known_len[kept] - columns.prompt_len[kept]).sum()),
            num_requests=num_kept,
            max_new=int((columns.max_len[kept] - columns.prompt_len[kept]).sum()),
        )
        return kept

    def _has_room(self, rows: IntArray) -> bool:
        needed = max(self.kv.decode_pages(rows) * self.settings.page_size, len(rows) * RETRACT_DECODE_STEPS)
        return needed <= self.kv.available

    def _take_back(self, request: Request) -> None:
        """Retract: what is computed goes into the cache, so that resuming is a hit while space lasts; the output so far
        becomes part of what is prefilled."""
        known = int(self.columns.known_len[request.row])
        request.packed = self.columns.packed(request.row, known)
        self._note(request, EventKind.RETRACTED, f"no KV memory for the next step; {known:,} tokens to be found again")
        self._leave(request)
        request.fill_len = known
        request.state = RequestState.WAITING
        request.retractions += 1
        self.counters.num_retractions += 1
        self.waiting_queue.resume(request)

    # Results

    def process_batch_result(self, batch: Batch, result: Result) -> StepOutput | None:
        """Take in what a step sampled. Returns the reply to the front, if there is something to tell."""
        replies = StepReplies()
        for take in self._moments.commit:
            take(batch, self.columns, result, replies)
        outcome = commit(self.columns, batch, result, self._is_eos)
        self.counters.num_generated_tokens += len(outcome.tokens)
        for end in outcome.ends:
            request = self.columns.requests[end.row]
            if end.reason == "error":
                self._finish(request, "error", message="the model's output was not finite", status=500, keep=False)
            else:
                self._finish(request, end.reason, matched=end.matched)
        if len(outcome.ids):
            finished, self._finished = self._finished, []
            return StepOutput(
                ids=outcome.ids.tobytes(),
                tokens=outcome.tokens.tobytes(),
                logprobs=replies.logprobs,
                finished=finished,
            )
        return self.take_finished()

    def process_batch_failure(self, batch: Batch, message: str) -> None:
        """A step failed on the device: its requests end with an error, and nothing computed is trusted any more.

        No step is in flight. All others are taken back and computed anew.
        """
        self.last_batch = None
        failed = {int(row) for row in batch.rows}
        for request in list(self.requests.values()):
            if request.row == NO_ROW:
                continue
            if request.row in failed:
                self._finish(request, "error", message=message, status=500, keep=False)
            else:
                request.packed = self.columns.packed(request.row, int(self.columns.known_len[request.row]))
                request.fill_len = len(request.packed) // TOKEN_BYTES
                self._leave(request, keep=False)
                request.state = RequestState.WAITING
                self.waiting_queue.resume(request)
        self.kv.reset_cache()

    def take_finished(self) -> StepOutput | None:
        """Final words that no result brought: refused and aborted requests."""
        finished, self._finished = self._finished, []
        return StepOutput(finished=finished) if finished else None

    # Looking on

    def _note(self, request: Request | GenerateRequest, kind: EventKind, detail: str) -> None:
        self.diary.note(request.id, request.rid, Event(self._now, self._planner.num_steps, kind, detail))

    def _note_pass(self, stop: Stop, at: Request | None = None, *, needed: int = 0, available: int = 0) -> None:
        id = -1 if at is None else at.id
        step = self._planner.num_steps
        self.diary.note_pass(self._now, step, stop, id, needed, available, len(self.waiting_queue))

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Only when no request is open."""
        if self.requests:
            return False
        self.kv.reset_cache()
        return True

    def forget_history(self) -> None:
        """Start counting anew, with an empty cache. No request is open."""
        self.counters = Counters()
        self.flush_cache()

    def stats(self) -> Stats:
        kv, counters = self.kv, self.counters
        page_size = self.settings.page_size
        evictable = kv.cache.evictable_pages * page_size
        return Stats(
            num_running=len(self.requests) - len(self.waiting_queue),
            num_waiting=len(self.waiting_queue),
            kv_tokens=kv.capacity,
            kv_used=kv.capacity - kv.allocator.num_free * page_size - evictable,
            kv_evictable=evictable,
            new_token_ratio=self.new_token_ratio.current,
            batch_is_full=self.batch_is_full,
            total_steps=counters.num_steps,
            total_prefill_steps=counters.num_prefill_steps,
            total_prompt_tokens=counters.num_prompt_tokens,
            total_cached_tokens=counters.num_cached_tokens,
            total_prefilled_tokens=counters.num_prefilled_tokens,
            total_generated_tokens=counters.num_generated_tokens,
            total_retractions=counters.num_retractions,
            total_evicted_tokens=kv.cache.total_evicted_pages * page_size,
            total_requests=counters.num_requests,
            total_aborted=counters.num_aborted,
        )

    def audit(self) -> None:
        """Check the books: every page has one owner. Raises BrokenBooks. Cost: proportional to the pool."""
        held = {request.rid: self.kv.held_pages(request) for request in self._with_row()}
        audit(self.kv.allocator, self.kv.cache, held)

    def _with_row(self) -> Iterable[Request]:
        return (request for request in self.requests.values() if request.row != NO_ROW)


class Counters:
    """What has happened since the start."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prefill_steps = 0
        self.num_requests = 0
        self.num_refused = 0
        self.num_aborted = 0
        self.num_prompt_tokens = 0  # of admitted requests
        self.num_cached_tokens = 0  # of these, found in the prefix cache
        self.num_prefilled_tokens = 0  # computed, retracted requests counted again
        self.num_generated_tokens = 0
        self.num_retractions = 0


def _piece(request: Request) -> str:
    """The part of its prompt that the planned step computes."""
    return f"computes {request.kv_len:,} to {request.extend_end:,} of {request.fill_len:,}"


def _mix(seed: int, number: int) -> int:
    """A seed for the request with this number: splitmix64, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z

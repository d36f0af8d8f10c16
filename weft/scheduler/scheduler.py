"""The scheduler: it chooses which requests run in the next step and processes the results.

Continuous batching: a finished request leaves at once, and a waiting request takes its row in the
next step. Prompts run before decode steps (or together with them, `mixed_chunk`), cut into chunks
so that no step gets too long. When a decode step does not fit in memory, the scheduler retracts
requests to the queue; their output is kept.

    add_request -> waiting_queue -> prefills -> running_batch -> outbox
                        ^------------- retract ------'

The scheduler is the only writer of its state, and writes no other: settings change through `apply`;
after faults and lost memory, `Recovery` (`recovery.py`) resets it. It knows neither the transport
of messages nor the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from weft.arrays import IntArray
from weft.grammar.protocol import NOT_FOLLOWED
from weft.memory.allocator import OutOfPages
from weft.messages.replies import Finish, FinishReason, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.status import Stats
from weft.plan.logits import NOTHING_LEFT
from weft.plan.step import Result
from weft.scheduler.background.opening import BackgroundOpening
from weft.scheduler.batch import NO_ROWS, Batch, End, RunningBatch, commit, slots_of_ended
from weft.scheduler.build import Shared, make_memory, make_policy, make_steps, switch_shadow
from weft.scheduler.feature import Feature, FeatureHooks
from weft.scheduler.history import Counters, EventKind, RequestHistory, Stop
from weft.scheduler.limits import QUEUE_IS_FULL, Refusal, RequestLimits
from weft.scheduler.outbox import Outbox
from weft.scheduler.pace.pace import Pace, guard_from_open
from weft.scheduler.policies.protocol import PolicyContext
from weft.scheduler.prefill import NO_ROOM
from weft.scheduler.request import (
    NO_ROW,
    Request,
    RequestState,
    matching_ids,
    seed_of,
)
from weft.scheduler.retraction import retract_until_fits
from weft.scheduler.service import SERVICES
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting.line import WaitingLine
from weft.scheduler.waiting.queue import WaitingQueue

A_HIGHER_PRIORITY = "a request of a far higher priority"
AN_ONLINE_REQUEST = "an online request"


class Scheduler:
    """`settings` change by `apply` and `set_policy`."""

    def __init__(self, settings: SchedulerSettings, features: Sequence[Feature] = ()) -> None:
        self.settings = settings
        self.kv = make_memory(settings)
        columns = self.kv.columns
        self.counters = Counters()
        self.history = RequestHistory(settings.sized_for.max_running_requests)
        self.hooks = FeatureHooks(features)
        self.outbox = Outbox()
        self.limits = RequestLimits(settings, self.kv.room.capacity)
        self.requests: dict[int, Request] = {}  # every open request, by id
        self.running_batch = RunningBatch()
        # How long a step may take, and what steps cost.
        self.pace = Pace(settings, columns, self.running_batch)
        report = self.outbox.policy_failed
        context = PolicyContext(settings, columns, self.running_batch, self.pace, report)
        policy = make_policy(settings, context, self.outbox, self.counters.shadow)
        self.waiting_queue = WaitingQueue(
            policy, self.kv.cache, settings.aging_s, BackgroundOpening(context)
        )
        shared = Shared(
            settings=settings,
            kv=self.kv,
            queue=self.waiting_queue,
            running=self.running_batch,
            hooks=self.hooks,
            pace=self.pace,
            limits=self.limits,
            history=self.history,
            counters=self.counters,
        )
        self.planner, self.prefills = make_steps(shared)
        # The batch that ran last; its prefills are not in the running batch yet.
        self.last_batch: Batch | None = None
        self.now = 0.0  # time of the last call that passed it

    # Requests come

    def add_request(
        self,
        message: GenerateRequest,
        now: float,
        refused: Refusal | None = None,
        *,
        features: tuple[Feature, ...] | None = None,
        first: bool = False,
    ) -> None:
        """Queue a request. With `first` it goes before all others, whatever the limits.

        A request that was refused or can never run ends here with an error. So do the requests that
        must leave because the queue exceeds its limits. `features` are the features that the
        request uses, if the caller has found them already (`FeatureHooks.used_by`).
        """
        self.now = now
        if message.id in self.requests:
            self.counters.messages.num_duplicates += 1
            return
        arrival_order = self.counters.num_requests
        self.counters.num_requests += 1
        prompt_len = message.prompt_len
        service = SERVICES[message.background]
        num_waiting = self.waiting_queue.num_before(service)
        self.history.arrived(
            message.id,
            message.rid,
            arrival_order,
            prompt_len,
            num_waiting,
            now,
            self.planner.num_steps,
            service,
        )
        if refused is None:
            refused = self.limits.refusal(message, self.settings, self.kv.room.left)
        if refused is not None:
            self._refuse(message, refused)
            return
        seed = message.sampling.seed
        if seed is None:
            seed = seed_of(self.settings.seed, arrival_order)
        request = Request(
            message,
            max_len=self.limits.max_len_of(message, prompt_len),
            seed=seed,
            arrival_order=arrival_order,
            arrival_s=now,
            goes_first=first,
        )
        if features is None:
            features = self.hooks.used_by(message)
        line = self.waiting_queue.line_of(request)
        self._enter(request, line, features)
        if not first:
            self._end_overflow(request, line)
        if features and request.id in self.requests:
            for feature in features:
                feature.arrive(message)

    def _refuse(self, message: GenerateRequest, refused: Refusal) -> None:
        why = refused.message
        self.history.finished(message.id, f"refused: {why}", 0, self.now, self.planner.num_steps)
        self.outbox.finish(
            Finish(id=message.id, reason="error", message=why, status=refused.status)
        )

    def _enter(self, request: Request, line: WaitingLine, features: tuple[Feature, ...]) -> None:
        """Open a request completely, or, if anything raises, not at all."""
        join = line.resume if request.spec.goes_first else line.append
        try:
            join(request)
            self.limits.deadlines.arrived(request)
        except BaseException:
            if request in line:
                line.remove(request)
            self.limits.deadlines.forget(request)
            raise
        self.requests[request.id] = request
        if features:
            self.hooks.subscribe(request.id, features)

    def _end_overflow(self, newcomer: Request, line: WaitingLine) -> None:
        """End the requests that must leave, now that `newcomer` may have made its line of the queue
        too long."""
        max_requests = self.settings.max_queued_requests
        max_tokens = self.settings.max_queued_tokens
        if len(line) <= max_requests and not max_tokens:
            return
        # The next pass will take as many requests from the queue as there are free rows.
        if not line.is_full and self.waiting_queue.gate is None:
            max_requests += self.kv.rows.num_free
        for loser in line.overflow(newcomer, max_requests, max_tokens):
            self.counters.num_queue_full += 1
            self._finish(loser, "error", message=QUEUE_IS_FULL.message, status=QUEUE_IS_FULL.status)

    # Requests go

    def fail(self, id: int, message: str, status: int = 500, *, retry_after_s: int = 0) -> None:
        """End a request with an error, whether it is open or could not be opened."""
        request = self.requests.get(id)
        if request is not None:
            self._finish(
                request,
                "error",
                message=message,
                status=status,
                keep=False,
                retry_after_s=retry_after_s,
            )
            return
        if self.history.is_open(id):
            self.history.finished(id, f"error: {message}", 0, self.now, self.planner.num_steps)
        self.outbox.finish(Finish(id=id, reason="error", message=message, status=status))

    def abort(self, message: Abort) -> None:
        """End requests in any state. Unknown ids are ignored: these requests have just finished."""
        for id in matching_ids(self.requests, message):
            request = self.requests.get(id)
            if request is not None:
                why = message.message
                self._finish(request, message.reason, message=why, status=message.status)

    def expire(self, now: float) -> None:
        """End the requests whose deadline is over."""
        self.now = now
        for late in self.limits.deadlines.expired(self.requests, now):
            self._finish(late.request, "abort", message=late.message, status=late.status)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        matched: int | None = None,
        message: str = "",
        status: int = 200,
        keep: bool = True,
        retry_after_s: int = 0,
    ) -> None:
        """Free all that a request owns, and send its final reply.

        With `keep`, its computed tokens stay in the prefix cache.
        """
        spec = request.spec
        has_row = request.row != NO_ROW
        known_len = request.fill_len
        if has_row:
            known_len = int(self.kv.columns.known_len[request.row])
        finish = Finish(
            id=request.id,
            reason=reason,
            matched=matched,
            message=message,
            status=status,
            prompt_tokens=spec.prompt_len,
            completion_tokens=known_len - spec.prompt_len,
            cached_tokens=request.cached_tokens,
            queue_s=max(request.admitted_s - spec.arrival_s, 0.0),
            retractions=request.retractions,
            retry_after_s=retry_after_s,
        )
        try:
            if has_row:
                self._release_row(request, keep=keep)
            else:
                self.outbox.attempt(self.waiting_queue.line_of(request).remove, request)
        finally:  # the request has ended, even if removing it raised
            self._say_end(request, finish)

    def _say_end(self, request: Request, finish: Finish) -> None:
        """Send the final reply of a request, even if a feature or the history raises."""
        request.state = RequestState.FINISHED
        del self.requests[request.id]
        features = self.hooks.unsubscribe(request)
        if finish.reason == "abort":
            self.counters.num_aborted += 1
        if request.spec.service.yields:
            self.counters.background.ended(finish)
        num_output = finish.completion_tokens
        prefill_s = 0.0
        retry_after_s = finish.retry_after_s
        accepted = 0
        rejected = 0
        try:
            for feature in features:
                self.outbox.attempt(feature.end, request, finish.reason, self.now, self.kv)
            detail = f"{finish.reason}, {num_output:,} tokens"
            if finish.message:
                detail += f": {finish.message}"
            key = None
            if request.message.shares_kv:
                key = request.cache_key(request.packed)
            trace = self.history.finished(
                request.id, detail, num_output, self.now, self.planner.num_steps, key
            )
            prefill_s = trace.prefill_s
            # Only requests that the queue refused or kept too long need a time for the next
            # attempt.
            if finish.status == QUEUE_IS_FULL.status and not retry_after_s:
                num_waiting = self.waiting_queue.num_before(request.spec.service)
                retry_after_s = self.limits.drain.retry_after_s(num_waiting, self.now)
            if trace.drafts is not None:
                predicted = trace.drafts.of("prediction")
                accepted = predicted.num_right
                rejected = predicted.num_drafts - predicted.num_right
        finally:
            last_word = msgspec.structs.replace(
                finish,
                prefill_s=prefill_s,
                retry_after_s=retry_after_s,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
            )
            self.outbox.finish(last_word)

    def _release_row(self, request: Request, *, keep: bool = True) -> None:
        """Take a request out of its row, and so out of the batch. Its known tokens are kept."""
        with self.outbox.atomic():
            self.history.leaves_row(request.id, request.row)
            known_len = int(self.kv.columns.known_len[request.row])
            request.packed = self.kv.columns.packed(request.row, known_len)
            for feature in self.hooks.of(request):
                self.outbox.attempt(feature.release, request)
            follower = self.waiting_queue.line_of(request).policy.follower
            if follower is not None:
                self.outbox.attempt(follower.left, request)
            self.prefills.row_released(request)
            self.planner.row_released(request)
            self.running_batch.remove(request.row)
            self.kv.release(request, keep=keep)

    # The next step

    def get_next_batch_to_run(self, now: float, *, in_flight: bool) -> Batch | None:
        """Choose the next step and prepare it, or None if there is nothing to run.

        With `in_flight` (the result of the last step is not known yet) None may also mean that the
        next step depends on that result: commit it, then ask again.
        """
        self.prefills.seen.clear()
        self.expire(now)
        self.merge_last_batch()
        room = NO_ROOM
        if self.waiting_queue.classes is not None:
            room = self.prefills.room_for_first(now)
        if room.victims and in_flight:
            # The result of a step must be known before requests give back their rows.
            self.prefills.record_no_walk(now, Stop.ROOM)
            return None
        for victim in room.victims:
            by = AN_ONLINE_REQUEST if victim.spec.service.yields else A_HIGHER_PRIORITY
            self.retract(victim, f"{by} takes its place")
        batch = self.prefills.next_batch(now, room.order)
        if batch is None:
            batch = self.update_running_batch(in_flight=in_flight)
        self.last_batch = batch
        if batch is not None:
            self.pace.planned(batch)
            steps = self.counters.steps
            steps.num_all += 1
            if batch.prefills:
                steps.num_prefill += 1
        return batch

    def merge_last_batch(self) -> None:
        """Share the pages that the last step prefilled; completed prompts join the running
        batch."""
        last_batch = self.last_batch
        if last_batch is None or not last_batch.prefills:
            self.last_batch = None
            return
        joining = []
        with self.outbox.atomic():
            for request in last_batch.prefills:
                if request.state is not RequestState.PREFILLING:
                    continue  # it has ended in the meantime
                self.kv.share(request)
                is_open = request is self.prefills.chunked_req
                is_done = request.is_prefilled
                assert is_done != is_open, (
                    f"{request.message.rid} has {request.kv_len} of its {request.fill_len} tokens, "
                    f"and is {'' if is_open else 'not '}the open chunk"
                )
                if is_done:
                    request.state = RequestState.DECODING
                    joining.append(request.row)
            self.running_batch.merge(joining)
            # Blocked requests come when they are let pass.
            num_arrived = min(self.counters.num_requests, self.waiting_queue.end)
            self.kv.columns.num_arrived[joining] = num_arrived
            if self.prefills.chunked_req is not None:
                guard_from_open(self.prefills.chunked_req, self.kv.columns, joining)
            self.last_batch = None

    def update_running_batch(self, *, in_flight: bool) -> Batch | None:
        """The next step, if no prompt is prefilled.

        Retracts requests if the step does not fit in memory and no result is outstanding.
        """
        rows = self.kv.columns.unfinished(self.running_batch.rows)
        if not len(rows):
            if not len(self.running_batch.rows):
                self.prefills.new_token_ratio.reset()
                # No request runs whose end would open admission again.
                self.prefills.note_room()
            return None
        if self.kv.room.decode_fits(rows):
            self.prefills.new_token_ratio.decay()
        elif in_flight:
            return None
        else:
            # Where rows take turns, rows of other turns own memory, too.
            rows = self.kv.columns.all_unfinished(self.running_batch.rows)
            rows = self._retract_until_fits(rows)
            if not len(rows):
                return None
        return self.planner.make_batch([], rows)

    def _retract_until_fits(self, rows: IntArray) -> IntArray:
        """Retract requests until the others can decode for a while. Returns the rows of the others;
        none if memory is still being returned.

        If the one row that is kept still lacks memory, the open chunk is retracted too, and then
        firm pins are removed.
        """
        is_awaited = self.kv.reclaim()
        if self.kv.room.decode_fits(rows):
            return rows
        lack = self.kv.room.out_of_memory(
            "decode", self.kv.room.decode_pages(rows) * self.kv.page_size
        )
        self.outbox.out_of_memory = lack
        retract = partial(self.retract, why=f"no KV memory for the next step: {lack}")
        kept = retract_until_fits(self.kv, rows, self.waiting_queue.rank, retract)
        if not self.kv.room.decode_fits(kept):
            for request in self.prefills.open_prompts():
                retract(request)
            # Only now, because this is the only request that runs.
            while not self.kv.room.decode_fits(kept) and self.kv.pins.give_way():
                pass
            if not self.kv.room.decode_fits(kept):
                if not is_awaited:  # a request that fits alone has no memory
                    raise OutOfPages(lack)
                return NO_ROWS
        self.prefills.new_token_ratio.learn(self.kv.columns, kept)
        return kept

    def retract(self, request: Request, why: str = "no KV memory for the next step") -> None:
        """Move a running request back to the queue.

        Its computed tokens go into the prefix cache, so resuming is a hit while there is space. Its
        output so far becomes part of what is prefilled.
        """
        known_len = int(self.kv.columns.known_len[request.row])
        detail = f"{why}; {known_len:,} tokens to be found again"
        self._release_row(request)
        self.history.retracted(request.id, detail, self.now, self.planner.num_steps)
        request.fill_len = known_len
        request.state = RequestState.WAITING
        request.retractions += 1
        self.counters.num_retractions += 1
        self.waiting_queue.line_of(request).resume(request)

    # Results

    def process_batch_result(
        self, batch: Batch, result: Result, now: float | None = None, began_s: float | None = None
    ) -> StepOutput | None:
        """Process the tokens that a step sampled. Returns the reply to the front, if there is one.

        `began_s`: when the device began the step; None: just now.
        """
        if now is not None:
            self.now = now
        if began_s is None:
            began_s = self.now
        columns = self.kv.columns
        is_eos = self.limits.is_eos
        settled = self.planner.settle(batch, result, is_eos)
        if settled is None:
            self.history.stepped(
                batch, columns, began_s, self.now, result.encoder_s, has_tokens=False
            )
            return self.outbox.take_output()
        effects = self.hooks.commit(batch, columns, settled)
        worthless = slots_of_ended(columns, batch, settled)
        outcome = commit(columns, batch, settled, is_eos, effects.ends, effects.forced)
        # From here on the tokens are known, so they must be reported even if something raises.
        self.outbox.put(
            StepOutput(
                ids=outcome.ids.tobytes(),
                tokens=outcome.tokens.tobytes(),
                logprobs=effects.logprobs,
                aux=effects.aux,
            )
        )
        self.counters.num_generated_tokens += len(outcome.tokens)
        for id, detail in effects.notes:
            if self.history.is_open(id):
                self.history.note(id, EventKind.ENCODER, detail, self.now, batch.plan.step)
        self.history.stepped(batch, columns, began_s, self.now, result.encoder_s)
        for end in outcome.ends:
            self.outbox.attempt(self.end, end)
        if len(worthless):
            with self.outbox.atomic():
                self.kv.forget_written(worthless)
        return self.outbox.take_output()

    def end(self, end: End) -> None:
        """End a request with its last token."""
        request = self.kv.columns.requests[end.row]
        if end.reason != "error":
            self._finish(request, end.reason, matched=end.matched)
            return
        # What the request itself makes impossible is the client's fault; other errors are the
        # server's.
        is_of_client = end.message.startswith((NOT_FOLLOWED, NOTHING_LEFT))
        status = 400 if is_of_client else 500
        self._finish(request, "error", message=end.message, status=status, keep=False)

    def memory_came_back(self) -> None:
        """There is more KV memory than in the last pass over the queue."""
        self.prefills.note_room()

    # Settings and cache

    def apply(self, settings: SchedulerSettings) -> None:
        """Use these settings from the next step on. Requests above a lower limit run to their end.
        Raises UnknownPolicy; then nothing has changed."""
        if settings.schedule_policy != self.settings.schedule_policy:
            self.set_policy(settings.schedule_policy)
        if settings.shadow_policy != self.settings.shadow_policy:
            switch_shadow(
                self.waiting_queue.online, settings.shadow_policy, self.outbox, self.counters.shadow
            )
        self.prefills.apply(settings)
        self.settings = settings
        self.kv.rows.limit = settings.max_running_requests

    def set_policy(self, name: str) -> None:
        """Order the waiting requests by this policy from now on. Raises UnknownPolicy."""
        settings = replace(self.settings, schedule_policy=name)
        policy = self.waiting_queue.online.policy
        shadow = self.counters.shadow
        made = make_policy(settings, policy.context, self.outbox, shadow, before=policy)
        self.outbox.policy_fault = ""
        self.waiting_queue.online.use(made)
        self.prefills.apply(settings)
        self.settings = settings

    def flush_cache(self) -> bool:
        """Empty the prefix cache, if no request has a row. Returns whether it did."""
        if len(self.requests) > len(self.waiting_queue):
            return False
        with self.outbox.atomic():
            self.kv.reset_cache()
            self.hooks.forget_device()
        return True

    # Observation

    @property
    def has_work(self) -> bool:
        """Whether a request is open, or a final reply is still to be sent."""
        return bool(self.requests) or not self.outbox.is_empty

    def stats(self) -> Stats:
        kv = self.kv
        page_size = self.settings.page_size
        return Stats(
            num_running=len(self.requests) - len(self.waiting_queue),
            num_waiting=len(self.waiting_queue),
            num_waiting_tokens=self.waiting_queue.num_tokens,
            num_background_running=kv.columns.num_background,
            num_background_waiting=self.waiting_queue.num_background,
            kv_tokens=kv.room.capacity,
            kv_evictable=kv.cache.evictable_pages * page_size,
            kv_held=kv.cache.pinned_pages * page_size,
            new_token_ratio=self.prefills.new_token_ratio.current,
            batch_is_full=self.waiting_queue.online.is_full,
            total_evicted_tokens=kv.cache.total_evicted_pages * page_size,
            kv_quarantined=len(kv.allocator.quarantined) * page_size,
            **kv.room.usage(),
            **self.counters.totals(),
        )

    def with_row(self) -> dict[str, Request]:
        """The requests that have a row, by name."""
        found = {}
        for request in self.requests.values():
            if request.row != NO_ROW:
                found[f"{request.message.rid} (request {request.id})"] = request
        return found

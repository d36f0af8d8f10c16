"""The scheduler: it chooses which requests run in the next step and processes the results.

Continuous batching: a finished request leaves at once, and a waiting request takes its row in the
next step. Prompts run before decode steps (or together with them, `mixed_chunk`), cut into chunks
so that no step gets too long. When a decode step does not fit in memory, the scheduler retracts
requests to the queue; their output is kept.

    add_request -> waiting_queue -> prefills -> running_batch -> outbox
                        ^------------- retract ------'

The scheduler is the only writer of its state, and writes no other: settings change through `apply`,
and `shrink` adapts it to lost memory. It knows neither the transport of messages nor the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from weft.arrays import IntArray
from weft.grammar.protocol import NOT_FOLLOWED
from weft.memory.accounting.audit import Fault
from weft.memory.allocator import OutOfPages
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.replies import Finish, FinishReason, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.status import Stats
from weft.observe.survivable import survived
from weft.plan.logits import NOTHING_LEFT
from weft.plan.step import Result
from weft.scheduler.batch import NO_ROWS, Batch, End, RunningBatch, commit, slots_of_ended
from weft.scheduler.build import Shared, make_memory, make_steps
from weft.scheduler.feature import Feature, FeatureHooks
from weft.scheduler.history import NO_DRAFTS, Counters, EventKind, RequestHistory, Stop
from weft.scheduler.kv import left, out_of_memory
from weft.scheduler.limits import QUEUE_IS_FULL, Refusal, RequestLimits
from weft.scheduler.outbox import Outbox
from weft.scheduler.pace.pace import Pace
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.composed.shadowed import Shadowed
from weft.scheduler.policies.protocol import Policy, PolicyContext
from weft.scheduler.prefill import NO_ROOM
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.request import (
    NO_ROW,
    Request,
    RequestState,
    matching_ids,
    seed_of,
)
from weft.scheduler.retraction import retract_until_fits
from weft.scheduler.settings import SchedulerSettings


class Scheduler:
    """`settings` change by `apply` and `set_policy`."""

    def __init__(self, settings: SchedulerSettings, features: Sequence[Feature] = ()) -> None:
        self.settings = settings
        self.kv = make_memory(settings)
        columns = self.kv.columns
        self.counters = Counters()
        self.history = RequestHistory()
        self.hooks = FeatureHooks(features)
        self.outbox = Outbox()
        self.limits = RequestLimits(settings, self.kv.capacity)
        self.requests: dict[int, Request] = {}  # every open request, by id
        self.running_batch = RunningBatch()
        # How long a step may take, and what steps cost; None: neither limits nor drafts need it.
        self.pace: Pace | None = None
        if settings.bounds_steps or settings.draft_sources:
            self.pace = Pace(settings, columns, self.running_batch)
        report = self.outbox.policy_failed
        context = PolicyContext(settings, columns, self.running_batch, self.pace, report)
        policy = self._new_policy(settings, context)
        self.waiting_queue = WaitingQueue(policy, self.kv.cache, settings.aging_s)
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
        self._now = 0.0  # time of the last call that passed it

    def _new_policy(self, settings: SchedulerSettings, context: PolicyContext) -> Policy:
        """The policy that decides, with its shadow if it has one. Raises UnknownPolicy."""
        live = build_policy(settings.schedule_policy, context)
        return self._with_shadow(settings.shadow_policy, live)

    def _with_shadow(self, name: str, live: Policy) -> Policy:
        if not name:
            return live
        context = live.context._replace(report=self.outbox.shadow_failed)
        shadow = build_policy(name, context)
        return Shadowed(live, shadow, name=name, counters=self.counters)

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
        self._now = now
        if message.id in self.requests:
            self.counters.num_duplicates += 1
            return
        arrival_order = self.counters.num_requests
        self.counters.num_requests += 1
        prompt_len = len(message.input_ids) // TOKEN_BYTES
        num_waiting = len(self.waiting_queue)
        self.history.arrived(
            message.id,
            message.rid,
            arrival_order,
            prompt_len,
            num_waiting,
            now,
            self.planner.num_steps,
        )
        if refused is None:
            refused = self.limits.refusal(message, self.settings, partial(left, self.kv))
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
        self._enter(request, features)
        if not first:
            self._end_overflow(request)
        if features and request.id in self.requests:
            for feature in features:
                feature.arrive(message)

    def _refuse(self, message: GenerateRequest, refused: Refusal) -> None:
        why = refused.message
        self.history.finished(message.id, f"refused: {why}", 0, self._now, self.planner.num_steps)
        self.outbox.finish(
            Finish(id=message.id, reason="error", message=why, status=refused.status)
        )

    def _enter(self, request: Request, features: tuple[Feature, ...]) -> None:
        """Open a request completely, or, if anything raises, not at all."""
        join = self.waiting_queue.resume if request.spec.goes_first else self.waiting_queue.append
        try:
            join(request)
            self.limits.deadlines.arrived(request)
        except BaseException:
            if request in self.waiting_queue:
                self.waiting_queue.remove(request)
            self.limits.deadlines.forget(request)
            raise
        self.requests[request.id] = request
        if features:
            self.hooks.subscribe(request.id, features)

    def _end_overflow(self, newcomer: Request) -> None:
        """End the requests that must leave, now that `newcomer` may have made the queue too
        long."""
        queue = self.waiting_queue
        max_requests = self.settings.max_queued_requests
        max_tokens = self.settings.max_queued_tokens
        if len(queue) <= max_requests and not max_tokens:
            return
        # The next pass will take as many requests from the queue as there are free rows.
        if not self.prefills.is_full and queue.gate is None:
            max_requests += self.kv.rows.num_free
        for loser in queue.overflow(newcomer, max_requests, max_tokens):
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
            self.history.finished(id, f"error: {message}", 0, self._now, self.planner.num_steps)
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
        self._now = now
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
                self.outbox.attempt(self.waiting_queue.remove, request)
        finally:  # the request has ended, even if removing it raised
            self._say_end(request, finish)

    def _say_end(self, request: Request, finish: Finish) -> None:
        """Send the final reply of a request, even if a feature or the history raises."""
        request.state = RequestState.FINISHED
        del self.requests[request.id]
        features = self.hooks.unsubscribe(request)
        if finish.reason == "abort":
            self.counters.num_aborted += 1
        num_output = finish.completion_tokens
        prefill_s = 0.0
        retry_after_s = finish.retry_after_s
        accepted = 0
        rejected = 0
        try:
            for feature in features:
                self.outbox.attempt(feature.end, request, finish.reason, self._now, self.kv)
            detail = f"{finish.reason}, {num_output:,} tokens"
            if finish.message:
                detail += f": {finish.message}"
            key = None
            if request.message.shares_kv:
                key = request.cache_key(request.packed)
            trace = self.history.finished(
                request.id, detail, num_output, self._now, self.planner.num_steps, key
            )
            prefill_s = trace.prefill_s
            # Only requests that the queue refused or kept too long need a time for the next
            # attempt.
            if finish.status == QUEUE_IS_FULL.status and not retry_after_s:
                num_waiting = len(self.waiting_queue)
                retry_after_s = self.limits.retry_after_s(num_waiting, self._now)
            predicted = trace.drafts.get("prediction", NO_DRAFTS)
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
        with self.outbox.whole():
            known_len = int(self.kv.columns.known_len[request.row])
            request.packed = self.kv.columns.packed(request.row, known_len)
            for feature in self.hooks.of(request):
                self.outbox.attempt(feature.release, request)
            follower = self.waiting_queue.policy.follower
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
        if self.waiting_queue.policy.classes is not None:
            room = self.prefills.room_for_first(now)
        if room.victims and not self._make_room(room.victims, in_flight):
            return None
        batch = self.prefills.next_batch(now, room.order)
        if batch is None:
            batch = self.update_running_batch(in_flight=in_flight)
        self.last_batch = batch
        if batch is not None:
            if self.pace is not None:
                self.pace.planned(batch)
            self.counters.num_steps += 1
            if batch.prefills:
                self.counters.num_prefill_steps += 1
        return batch

    def _make_room(self, victims: list[Request], in_flight: bool) -> bool:
        """Retract `victims`, so that a waiting request of a far higher class can take their memory.

        Returns False if the result of a step must be known first.
        """
        if in_flight:
            self.prefills.record_no_walk(self._now, Stop.ROOM)
            return False
        for victim in victims:
            self.retract(victim, "a request of a far higher priority takes its place")
        return True

    def merge_last_batch(self) -> None:
        """Share the pages that the last step prefilled; completed prompts join the running
        batch."""
        last_batch = self.last_batch
        if last_batch is None or not last_batch.prefills:
            self.last_batch = None
            return
        joining = []
        with self.outbox.whole():
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
            self.kv.columns.num_arrived[joining] = self.counters.num_requests
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
                self.prefills.is_full = False
            return None
        if self.kv.decode_fits(rows):
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
        if self.kv.decode_fits(rows):
            return rows
        lack = out_of_memory(self.kv, "decode", self.kv.decode_pages(rows) * self.kv.page_size)
        self.outbox.out_of_memory = lack
        retract = partial(self.retract, why=f"no KV memory for the next step: {lack}")
        kept = retract_until_fits(self.kv, rows, self.waiting_queue.rank, retract)
        if not self.kv.decode_fits(kept):
            for request in self.prefills.open_prompts():
                retract(request)
            # Only now, because this is the only request that runs.
            while not self.kv.decode_fits(kept) and self.kv.pins.give_way():
                pass
            if not self.kv.decode_fits(kept):
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
        self.history.retracted(request.id, detail, self._now, self.planner.num_steps)
        self._release_row(request)
        request.fill_len = known_len
        request.state = RequestState.WAITING
        request.retractions += 1
        self.counters.num_retractions += 1
        self.waiting_queue.resume(request)

    # Results

    def process_batch_result(
        self, batch: Batch, result: Result, now: float | None = None
    ) -> StepOutput | None:
        """Process the tokens that a step sampled. Returns the reply to the front, if there is
        one."""
        if now is not None:
            self._now = now
        columns = self.kv.columns
        is_eos = self.limits.is_eos
        settled = self.planner.settle(batch, result, is_eos)
        if settled is None:
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
                self.history.note(id, EventKind.ENCODER, detail, self._now, batch.plan.step)
        for request in batch.prefills:
            row = request.row
            if row != NO_ROW and columns.known_len[row] > columns.prompt_len[row]:
                self.history.first_token(request.id, self._now, batch.plan.step)
        for end in outcome.ends:
            self.outbox.attempt(self._end, end)
        if len(worthless):
            with self.outbox.whole():
                self.kv.forget_written(worthless)
        return self.outbox.take_output()

    def _end(self, end: End) -> None:
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

    # Faults

    def process_batch_failure(self, batch: Batch, message: str) -> None:
        """A step failed on the device: end its requests with an error. No step is in flight."""
        self.recompute(self.open_ids(batch), message, "a step failed on the device")

    def open_ids(self, batch: Batch) -> set[int]:
        """The requests of a batch that are still open."""
        is_live = self.kv.columns.epoch[batch.rows] == batch.epochs
        return set(self.kv.columns.ids[batch.rows[is_live]].tolist())

    def suspects(self) -> set[int]:
        """The ids of requests to end after a fault in planning: those that were concerned in an
        earlier fault, too.

        A fault that one request causes would come again and again, so no request is planned for a
        third time. Concerned are requests that have a row or that the last pass looked at; if there
        are none, all requests.
        """
        seen = self.prefills.seen
        requests = self.requests.values()
        concerned = [one.id for one in requests if one.row != NO_ROW or one.id in seen]
        return self.outbox.blame(concerned or list(self.requests))

    def recompute(
        self, failed: set[int], message: str, why: str, *, in_doubt: bool = False
    ) -> None:
        """Discard all computed tokens: end the requests `failed`, and compute the others again.

        The accounts of memory are reset, whatever their content. With `in_doubt`, the queue is
        reset, too, and its policy forgets the requests that it has seen. If anything raises, all
        this is done again with `in_doubt`. No step is in flight.
        """
        try:
            self._recompute(failed, message, why, in_doubt=in_doubt)
        except BaseException as exc:
            self.outbox.faults.append(survived(exc))
            self._recompute(failed, message, why, in_doubt=True)

    def _recompute(self, failed: set[int], message: str, why: str, *, in_doubt: bool) -> None:
        """Can be called again after an exception: until the rows are reset, the tokens of each
        request are in its row, and afterwards in `Request.packed`."""
        self.last_batch = None
        self.prefills.reset()
        with_row = [request for request in self.requests.values() if request.row != NO_ROW]
        for request in with_row:
            request.packed = self.kv.known_tokens(request)
        for request in with_row:
            for feature in self.hooks.of(request):
                self.outbox.attempt(feature.release, request)
            follower = self.waiting_queue.policy.follower
            if follower is not None and not in_doubt:
                follower.left(request)
        if in_doubt:
            self.waiting_queue.stop_index()  # it is made again below
        self.running_batch.reset()
        self.hooks.forget_device()
        self.kv.reset()
        for request in self.requests.values():
            request.forget_kv()
        if in_doubt:
            policy = self._new_policy(self.settings, self.waiting_queue.policy.context)
            self.waiting_queue.begin_anew(policy, self.requests.values())
        else:
            for request in with_row:
                self.waiting_queue.resume(request)
        self.outbox.is_in_doubt = False
        for id in sorted(failed & self.requests.keys()):
            self._finish(self.requests[id], "error", message=message, status=500)
        for request in with_row:
            if request.id in self.requests:
                detail = f"{why}: all is computed anew"
                self.history.retracted(request.id, detail, self._now, self.planner.num_steps)

    def shrink(self) -> None:
        """Adapt to lost KV memory: requests end earlier, and those that can no longer run end
        now."""
        self.limits.shrink(self.settings.context_length, self.kv.capacity)
        max_len = self.limits.max_len
        too_long = set()
        for request in self.requests.values():
            if request.fill_len >= max_len:
                too_long.add(request.id)
        if too_long:
            message = (
                "there is no KV memory for it any more: at most "
                f"{max_len:,} tokens fit, its prefill and its output together"
            )
            self.recompute(too_long, message, "KV memory was lost")
        for request in self.requests.values():
            request.max_len = min(request.max_len, max_len)
            if request.row != NO_ROW:
                self.kv.columns.max_len[request.row] = request.max_len
                self.kv.columns.num_changes += 1

    def memory_came_back(self) -> None:
        """There is more KV memory than in the last pass over the queue."""
        self.prefills.is_full = False

    # Settings and cache

    def apply(self, settings: SchedulerSettings) -> None:
        """Use these settings from the next step on. Requests above a lower limit run to their end.
        Raises UnknownPolicy; then nothing has changed."""
        if settings.schedule_policy != self.settings.schedule_policy:
            self.set_policy(settings.schedule_policy)
        if settings.shadow_policy != self.settings.shadow_policy:
            self.set_shadow(settings.shadow_policy)
        self.prefills.apply(settings)
        self.settings = settings
        self.kv.rows.limit = settings.max_running_requests

    def set_policy(self, name: str) -> None:
        """Order the waiting requests by this policy from now on. Raises UnknownPolicy."""
        settings = replace(self.settings, schedule_policy=name)
        before = self.waiting_queue.policy
        policy = self._new_policy(settings, before.context)
        if isinstance(policy, Shadowed) and isinstance(before, Shadowed):
            policy.remember(before)
        self.outbox.policy_fault = ""
        self.waiting_queue.use(policy)
        self.prefills.apply(settings)
        self.settings = settings

    def set_shadow(self, name: str) -> None:
        """Use this policy as the shadow policy from now on; no name: no shadow. The live policy is
        not affected. Raises UnknownPolicy."""
        queue = self.waiting_queue
        live = queue.policy
        tags = queue.tags()
        if isinstance(live, Shadowed):
            tags = live.tags_of_live(tags)
            live = live.live
        policy = self._with_shadow(name, live)
        if isinstance(policy, Shadowed):
            tags = policy.introduce(queue, tags)
        self.outbox.shadow_fault = ""
        queue.go_on_with(policy, tags)
        self.settings = replace(self.settings, shadow_policy=name)

    def flush_cache(self) -> bool:
        """Empty the prefix cache, if no request has a row. Returns whether it did."""
        if len(self.requests) > len(self.waiting_queue):
            return False
        with self.outbox.whole():
            self.kv.reset_cache()
            self.hooks.forget_device()
        return True

    # Observation

    def note_device_is_busy(self, why: Stop = Stop.DEVICE) -> None:
        """Note that no step is planned: the device is busy with other work, or its memory is
        released."""
        self.prefills.record_no_walk(self._now, why)

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
            kv_tokens=kv.capacity,
            kv_evictable=kv.cache.evictable_pages * page_size,
            kv_held=kv.cache.pinned_pages * page_size,
            new_token_ratio=self.prefills.new_token_ratio.current,
            batch_is_full=self.prefills.is_full,
            total_evicted_tokens=kv.cache.total_evicted_pages * page_size,
            kv_quarantined=len(kv.allocator.quarantined) * page_size,
            **kv.usage(),
            **self.counters.totals(),
        )

    def audit(self) -> None:
        """Check that every page has one owner. Raises AccountingError. Cost: linear in the pool."""
        self.kv.audit(self.with_row())

    def find_faults(self) -> list[Fault]:
        """The pages that do not have exactly one owner. Raises AccountingError for a page outside
        of the pool. Cost: linear in the pool."""
        return self.kv.find_faults(self.with_row())

    def with_row(self) -> dict[str, Request]:
        """The requests that have a row, by name."""
        found = {}
        for request in self.requests.values():
            if request.row != NO_ROW:
                found[f"{request.message.rid} (request {request.id})"] = request
        return found

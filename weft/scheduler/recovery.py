"""What the scheduler does when computed tokens cannot be trusted: after a fault, after new weights,
and when memory is lost.

`recompute` is the one way back: it frees all memory, whatever its accounts say, and the requests
that go on are computed again from their tokens. A plain step uses nothing of this.
"""

from __future__ import annotations

from weft.observe.survivable import survived
from weft.scheduler.batch import Batch
from weft.scheduler.build import make_policy
from weft.scheduler.request import NO_ROW
from weft.scheduler.scheduler import Scheduler


class Recovery:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def step_failed(self, batch: Batch, message: str) -> None:
        """A step failed on the device: end its requests with an error. No step is in flight."""
        self.recompute(self.open_ids(batch), message, "a step failed on the device")

    def open_ids(self, batch: Batch) -> set[int]:
        """The requests of a batch that are still open."""
        scheduler = self._scheduler
        is_live = scheduler.kv.columns.epoch[batch.rows] == batch.epochs
        return set(scheduler.kv.columns.ids[batch.rows[is_live]].tolist())

    def suspects(self) -> set[int]:
        """The ids of requests to end after a fault in planning: those that were concerned in an
        earlier fault, too.

        A fault that one request causes would come again and again, so no request is planned for a
        third time. Concerned are requests that have a row or that the last pass looked at; if there
        are none, all requests.
        """
        scheduler = self._scheduler
        seen = scheduler.prefills.seen
        requests = scheduler.requests.values()
        concerned = [one.id for one in requests if one.row != NO_ROW or one.id in seen]
        return scheduler.outbox.blame(concerned or list(scheduler.requests))

    def recompute(
        self, failed: set[int], message: str, why: str, *, in_doubt: bool = False
    ) -> None:
        """Discard all computed tokens: end the requests `failed`, and compute the others again.

        The accounts of memory are reset, whatever their content. With `in_doubt`, the queue is
        reset, too, and its policy forgets the requests that it has seen. If anything raises, all
        this is done again with `in_doubt`. No step is in flight.
        """
        scheduler = self._scheduler
        try:
            self._recompute(failed, message, why, in_doubt=in_doubt)
        except BaseException as exc:
            scheduler.outbox.faults.append(survived(exc))
            self._recompute(failed, message, why, in_doubt=True)

    def _recompute(self, failed: set[int], message: str, why: str, *, in_doubt: bool) -> None:
        """Can be called again after an exception: until the rows are reset, the tokens of each
        request are in its row, and afterwards in `Request.packed`."""
        scheduler = self._scheduler
        requests = scheduler.requests
        queue = scheduler.waiting_queue
        outbox = scheduler.outbox
        scheduler.last_batch = None
        scheduler.prefills.reset()
        with_row = [request for request in requests.values() if request.row != NO_ROW]
        for request in with_row:
            request.packed = scheduler.kv.known_tokens(request)
        for request in with_row:
            for feature in scheduler.hooks.of(request):
                outbox.attempt(feature.release, request)
            follower = queue.line_of(request).policy.follower
            if follower is not None and not in_doubt:
                follower.left(request)
        if in_doubt:
            queue.stop_indexes()  # they are made again below
        scheduler.running_batch.reset()
        scheduler.hooks.forget_device()
        scheduler.kv.reset()
        for request in requests.values():
            request.forget_kv()
        if in_doubt:
            policy = make_policy(
                scheduler.settings, queue.online.policy.context, outbox, scheduler.counters.shadow
            )
            queue.begin_anew(policy, requests.values())
        else:
            for request in with_row:
                queue.line_of(request).resume(request)
        outbox.is_in_doubt = False
        for id in sorted(failed & requests.keys()):
            scheduler.fail(id, message)
        step = scheduler.planner.num_steps
        for request in with_row:
            if request.id in requests:
                detail = f"{why}: all is computed anew"
                scheduler.history.retracted(request.id, detail, scheduler.now, step)

    def shrink(self) -> None:
        """Adapt to lost KV memory: requests end earlier, and those that can no longer run end
        now."""
        scheduler = self._scheduler
        scheduler.limits.shrink(scheduler.settings.context_length, scheduler.kv.room.capacity)
        max_len = scheduler.limits.max_len
        too_long = set()
        for request in scheduler.requests.values():
            if request.fill_len >= max_len:
                too_long.add(request.id)
        if too_long:
            message = (
                "there is no KV memory for it any more: at most "
                f"{max_len:,} tokens fit, its prefill and its output together"
            )
            self.recompute(too_long, message, "KV memory was lost")
        for request in scheduler.requests.values():
            request.max_len = min(request.max_len, max_len)
            if request.row != NO_ROW:
                scheduler.kv.columns.max_len[request.row] = request.max_len
                scheduler.kv.columns.num_changes += 1

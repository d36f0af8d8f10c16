"""Which running requests make room for a waiting one that is far above them, under a policy that preempts.

They are taken back as in a retraction: output kept, what they have computed left to the prefix cache. Nobody is touched
unless that lets the waiting one in, and nobody who got in because it had waited too long.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import PrefillAdder
from weft.scheduler.batch import NO_ROWS, RunningBatch
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.kv import KvMemory
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.ratio import expected_tokens
from weft.scheduler.request import Request
from weft.scheduler.retraction import cheapest, freed_tokens


class Preemption:
    """`make_adder` gives the budgets of a pass in which the given rows decode."""

    def __init__(
        self,
        queue: WaitingQueue,
        kv: KvMemory,
        running: RunningBatch,
        hooks: FeatureHooks,
        make_adder: Callable[[IntArray], PrefillAdder],
    ) -> None:
        self._queue = queue
        self._kv = kv
        self._running = running
        self._hooks = hooks
        self._make_adder = make_adder

    def victims(self, now: float, chunked_req: Request | None, ratio: float) -> list[Request]:
        """Who must go, so that the first that waits can come in; empty if nobody must, or if it does not help."""
        if self._queue.policy.classes is None or not self._queue:
            return []
        first = next(self._queue.order(now), None)
        if first is None:
            return []
        rows = self._running.rows
        if chunked_req is not None:  # it has the next step, so nobody else's place would help
            rows = np.array([chunked_req.row], dtype=np.int32)
        rows = rows[self._queue.policy.classes.far_below(first, rows)]
        if not len(rows) or not self._hooks.may_run(first):
            return []
        below = [
            request
            for request in self._kv.columns.requests[rows]
            if not self._queue.is_overdue(request, now)
        ]
        return below if chunked_req is not None else self._enough(below, first, ratio)

    def _enough(self, below: list[Request], first: Request, ratio: float) -> list[Request]:
        """The lowest and cheapest of `below`, as many as `first` needs; none if all are not enough."""
        kv = self._kv
        adder = self._make_adder(NO_ROWS)
        kv.match(first)
        kv.lock(first)  # its prefix cannot be evicted for it
        lacking = adder.needed_tokens(first) - adder.rem_total_tokens
        kv.unlock(first)
        victims: list[Request] = []
        rest = list(below)
        while lacking >= 0 or kv.rows.num_used - len(victims) >= kv.rows.limit:
            if not rest:
                return []
            victim = cheapest(rest, kv, max(int(lacking), kv.page_size), self._queue.rank)
            rest.remove(victim)
            victims.append(victim)
            row = np.array([victim.row], dtype=np.int32)
            lacking -= freed_tokens(kv, victim) + expected_tokens(kv.columns, row, ratio)
        return victims

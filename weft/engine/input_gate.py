"""Blocking the input: requests that come while it is blocked are kept until it is open again.

They are in the waiting queue like other requests, so limits, deadlines, aborts and explanations
apply to them; the queue only does not offer them to a pass. Control requests are not blocked.

    unblocked ── block ─▶ blocked ── unblock ─▶ unblocked
                                  └─ with a ramp ─▶ ramping ── its end ─▶ unblocked

Several engines change at one moment, and those that keep step with each other at the same step:
until then, each is in the state `barrier`. What was blocked goes on in order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.control import InputState
from weft.messages.requests import GenerateRequest
from weft.scheduler.pace.ramp import Ramp

WHY = "the input is blocked until POST /unblock"
BARRIER = "the input is blocked until all engines open it, at one moment"


class Barrier(NamedTuple):
    """A change of the input at a moment that all engines have been told."""

    at_s: float
    change: Callable[[float, int], None]  # gets the time, and the next arrival order


class InputGate(Service):
    """Attached while the input is not open, and while a change is due."""

    name = "input gate"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._is_blocked = False
        self._barrier: Barrier | None = None
        self._ramp: Ramp | None = None
        self._num_meetings = 0  # changes for which the other engines are waited for

    @property
    def state(self) -> InputState:
        if self._barrier is not None or self._num_meetings:
            return "barrier"
        if self._ramp is not None:
            return "ramping"
        return "blocked" if self._is_blocked else "unblocked"

    def ramp_left_s(self, now: float) -> float:
        """Seconds until a ramp is over; 0: there is none."""
        return 0.0 if self._ramp is None else self._ramp.left_s(now)

    def block(self, now: float, at_s: float = 0.0) -> None:
        """Block requests that come from `at_s` on. Blocked ones stay blocked."""
        self._change(Barrier(at_s, self._block), now)

    def unblock(self, now: float, ramp_s: float = 0.0, at_s: float = 0.0) -> None:
        """Offer the blocked requests to the next pass, and block no more, from `at_s` on. With a
        ramp, requests go on at a growing rate for so many seconds; then also those that wait in an
        input that is not blocked."""
        if self.state == "unblocked" and not ramp_s:
            return
        if at_s > now:
            self._explain(BARRIER)

        def open_input(then: float, next_arrival: int) -> None:
            if ramp_s:
                self._begin_ramp(then, ramp_s, next_arrival)
            else:
                self._open(then)

        self._change(Barrier(at_s, open_input), now)

    def begin_meeting(self) -> None:
        """A change is due when all engines that keep step have come to the same step."""
        self._num_meetings += 1
        self._explain(BARRIER)

    def end_meeting(self) -> None:
        """All engines are there, or some did not come: the change follows, or there is none."""
        self._num_meetings -= 1
        self._explain(WHY)

    def wake_at(self) -> float:
        if self._barrier is not None:
            return self._barrier.at_s
        if self._ramp is None:
            return math.inf
        scheduler = self._core.scheduler
        gate = scheduler.waiting_queue.gate
        assert gate is not None, "a ramp blocks those behind it"
        return self._ramp.next_s(gate.blocked_from, scheduler.counters.num_requests)

    def opened(self, message: GenerateRequest, now: float) -> None:
        """Record in the history of a request why it waits."""
        scheduler = self._core.scheduler
        # The request itself is the first that comes after the moment.
        self._pass_barrier(now, scheduler.counters.num_requests - 1)
        gate = scheduler.waiting_queue.gate
        if gate is not None:
            scheduler.history.waits_for(message.id, gate.why, now, scheduler.planner.num_steps)

    def before_step(self, now: float) -> None:
        scheduler = self._core.scheduler
        num_requests = scheduler.counters.num_requests
        self._pass_barrier(now, num_requests)
        ramp = self._ramp
        if ramp is None:
            return
        if ramp.is_over(now):
            self._open(now)
        else:
            self._release(ramp.frontier(now, num_requests), now)

    # Inside

    def _explain(self, why: str) -> None:
        """Tell those that wait because the input is blocked what opens it."""
        gate = self._core.scheduler.waiting_queue.gate
        if gate is not None and self._is_blocked:
            gate.why = why

    def _change(self, barrier: Barrier, now: float) -> None:
        self._barrier = barrier
        self._core.hooks.attach(self)
        self._pass_barrier(now, self._core.scheduler.counters.num_requests)

    def _pass_barrier(self, now: float, next_arrival: int) -> None:
        barrier = self._barrier
        if barrier is None or now < barrier.at_s:
            return
        self._barrier = None
        barrier.change(now, next_arrival)

    def _block(self, now: float, next_arrival: int) -> None:
        self._ramp = None
        self._is_blocked = True
        self._core.scheduler.waiting_queue.block(next_arrival, WHY)

    def _begin_ramp(self, now: float, ramp_s: float, next_arrival: int) -> None:
        queue = self._core.scheduler.waiting_queue
        oldest = next(queue.newcomers(), None)
        why = (
            "the input opens gradually: requests go on in order of arrival, at a growing rate, "
            f"for {ramp_s:g} s"
        )
        first = next_arrival if oldest is None else oldest.spec.arrival_order
        gate = queue.block(first, why)
        self._is_blocked = False
        num_blocked = next_arrival - gate.blocked_from
        self._ramp = Ramp(now, ramp_s, gate.blocked_from, num_blocked)

    def _release(self, frontier: int, now: float) -> None:
        """Let the requests before `frontier` go on."""
        scheduler = self._core.scheduler
        queue = scheduler.waiting_queue
        gate = queue.gate
        assert gate is not None, "a ramp blocks those behind it"
        if frontier <= gate.blocked_from:
            return
        released = []
        for request in queue.blocked():
            if request.spec.arrival_order >= frontier:
                break
            released.append(request.id)
        gate.open_until(frontier)
        for id in released:
            scheduler.history.waits_no_more(
                id, "its turn in the ramp has come", now, scheduler.planner.num_steps
            )

    def _open(self, now: float) -> None:
        scheduler = self._core.scheduler
        released = list(scheduler.waiting_queue.blocked())
        scheduler.waiting_queue.unblock()
        # Last, so that after an exception before it the input can still be opened.
        self._is_blocked = False
        self._ramp = None
        self._core.hooks.detach(self)
        for request in released:
            scheduler.history.waits_no_more(
                request.id, "the input is open again", now, scheduler.planner.num_steps
            )

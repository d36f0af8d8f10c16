"""Blocking the input: requests that come while it is blocked are kept, and looked at when it is open again.

    UNBLOCKED ── block ──▶ BLOCKED ── unblock ──▶ GLOBAL_UNBLOCK_BARRIER ── all have arrived ──▶ UNBLOCKED
                              ◀─────────────── block ───────────────┘

What is kept stands in the waiting queue like any other request, so limits, deadlines, aborts and explanations hold for
it; the queue only does not offer it. Control requests are not held back at all. Engines that have to take in the same
requests in the same step open together, by a barrier that is asked once a step and never waited for.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from weft.scheduler.scheduler import Scheduler

WHY = "the input is blocked until POST /unblock"


class InputState(Enum):
    UNBLOCKED = "unblocked"
    BLOCKED = "blocked"
    GLOBAL_UNBLOCK_BARRIER = "global_unblock_barrier"  # told to open; others have not been yet


class Barrier(Protocol):
    """Where engines that run in step meet. No call waits."""

    def arrive(self) -> None:
        """This engine could go on."""

    def withdraw(self) -> None:
        """It could not after all."""

    def poll(self) -> bool:
        """Whether all have arrived since the last time that this was so."""


class Alone:
    """The barrier of an engine that has nobody to wait for."""

    def arrive(self) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def poll(self) -> bool:
        return True


class InputBlocker:
    def __init__(self, barrier: Barrier) -> None:
        self.state = InputState.UNBLOCKED
        self.barrier = barrier

    def block(self, scheduler: Scheduler) -> None:
        """Hold back what comes from now on. What is held back already stays so."""
        if self.state is InputState.GLOBAL_UNBLOCK_BARRIER:
            self.barrier.withdraw()
        self.state = InputState.BLOCKED
        scheduler.waiting_queue.block(scheduler.counters.num_requests)

    def unblock(self, scheduler: Scheduler, now: float) -> None:
        """Open, at once if there is nobody to wait for."""
        if self.state is InputState.BLOCKED:
            self.state = InputState.GLOBAL_UNBLOCK_BARRIER
            self.barrier.arrive()
            self.poll(scheduler, now)

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Open if all have arrived."""
        if self.state is InputState.GLOBAL_UNBLOCK_BARRIER and self.barrier.poll():
            self.state = InputState.UNBLOCKED
            for request in scheduler.waiting_queue.blocked():
                scheduler.history.waits_no_more(
                    request.id, "the input is open again", now, scheduler.num_steps
                )
            scheduler.waiting_queue.unblock()

    def note_arrival(self, scheduler: Scheduler, id: int, now: float) -> None:
        """A request has come: if it is held back, its trace says so."""
        if self.state is not InputState.UNBLOCKED and id in scheduler.requests:
            scheduler.history.waits_for(id, WHY, now, scheduler.num_steps)

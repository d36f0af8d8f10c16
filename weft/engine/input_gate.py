"""Blocking the input: requests that come while it is blocked are kept, and looked at when it is
open again.

What is kept stands in the waiting queue like any other request, so limits, deadlines, aborts and
explanations hold for it; the queue only does not offer it. Control requests are not held back.
"""

from __future__ import annotations

from typing import Literal

from weft.scheduler.scheduler import Scheduler

WHY = "the input is blocked until POST /unblock"


class InputGate:
    def __init__(self) -> None:
        self.state: Literal["unblocked", "blocked"] = "unblocked"

    def block(self, scheduler: Scheduler) -> None:
        """Hold back what comes from now on. What is held back already stays so."""
        self.state = "blocked"
        scheduler.waiting_queue.block(scheduler.counters.num_requests)

    def unblock(self, scheduler: Scheduler, now: float) -> None:
        """Let in what was held back, and what comes."""
        if self.state == "unblocked":
            return
        self.state = "unblocked"
        for request in scheduler.waiting_queue.blocked():
            scheduler.history.waits_no_more(
                request.id, "the input is open again", now, scheduler.num_steps
            )
        scheduler.waiting_queue.unblock()

    def note_arrival(self, scheduler: Scheduler, id: int, now: float) -> None:
        """A request has come: if it is held back, its trace says so."""
        if self.state == "blocked" and id in scheduler.requests:
            scheduler.history.waits_for(id, WHY, now, scheduler.num_steps)

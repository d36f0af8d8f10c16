"""Blocking the input: requests that come while it is blocked are kept until it is open again.

They are in the waiting queue like other requests, so limits, deadlines, aborts and explanations
apply to them; the queue only does not offer them to a pass. Control requests are not blocked.
"""

from __future__ import annotations

from typing import Literal

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.requests import GenerateRequest

WHY = "the input is blocked until POST /unblock"


class InputGate(Service):
    """Attached while the input is blocked."""

    name = "input gate"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.state: Literal["unblocked", "blocked"] = "unblocked"

    def block(self) -> None:
        """Block requests that come from now on. Blocked ones stay blocked."""
        scheduler = self._core.scheduler
        self.state = "blocked"
        self._core.hooks.attach(self)
        scheduler.waiting_queue.block(scheduler.counters.num_requests)

    def unblock(self, now: float) -> None:
        """Offer the blocked requests to the next pass, and block no more."""
        if self.state == "unblocked":
            return
        scheduler = self._core.scheduler
        released = list(scheduler.waiting_queue.blocked())
        scheduler.waiting_queue.unblock()
        # Last, so that after an exception before it the input can still be opened.
        self.state = "unblocked"
        self._core.hooks.detach(self)
        for request in released:
            scheduler.history.waits_no_more(
                request.id, "the input is open again", now, scheduler.planner.num_steps
            )

    def opened(self, message: GenerateRequest, now: float) -> None:
        """Record in the history of a request why it waits."""
        scheduler = self._core.scheduler
        scheduler.history.waits_for(message.id, WHY, now, scheduler.planner.num_steps)

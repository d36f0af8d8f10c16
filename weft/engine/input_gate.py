"""Blocking the input: requests that come while it is blocked are kept, and looked at when it is
open again.

They stand in the waiting queue like any other request, so limits, deadlines, aborts and
explanations hold for them; the queue only does not offer them. Control requests are not blocked.
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
        """Keep requests that come from now on. Those that are kept already stay so."""
        scheduler = self._core.scheduler
        self.state = "blocked"
        self._core.hooks.attach(self)
        scheduler.waiting_queue.block(scheduler.counters.num_requests)

    def unblock(self, now: float) -> None:
        """Offer the requests that were kept, and those that come."""
        if self.state == "unblocked":
            return
        scheduler = self._core.scheduler
        released = list(scheduler.waiting_queue.blocked())
        scheduler.waiting_queue.unblock()
        # Last: what raises before it leaves an input that can be opened again.
        self.state = "unblocked"
        self._core.hooks.detach(self)
        for request in released:
            scheduler.history.waits_no_more(
                request.id, "the input is open again", now, scheduler.planner.num_steps
            )

    def opened(self, message: GenerateRequest, now: float) -> None:
        """The history of a request says why it waits."""
        scheduler = self._core.scheduler
        scheduler.history.waits_for(message.id, WHY, now, scheduler.planner.num_steps)

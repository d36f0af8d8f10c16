"""Pausing generation: no step runs until it goes on; requests still come, end by their deadlines,
and can be aborted.

The three modes differ in what becomes of open requests. `abort` ends them. `retract` takes those
that run back to the queue: then the KV memory is free and may be flushed, and the weights may
change. `in_place` leaves everything where it is.
"""

from __future__ import annotations

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.messages.control import PauseMode
from weft.messages.requests import Abort, GenerateRequest
from weft.scheduler.history import EventKind
from weft.scheduler.request import NO_ROW

WHY = "generation is paused until POST /continue_generation"


class Pause(Service):
    """Attached while generation is paused."""

    name = "pause"
    holds_steps = True

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.mode: PauseMode | None = None  # None: generation goes on

    def begin(self, mode: PauseMode, now: float) -> None:
        """Pause, or pause in another mode. No step is in flight."""
        self.mode = mode
        self._core.hooks.attach(self)
        scheduler = self._core.scheduler
        if mode == "abort":
            scheduler.abort(Abort(all=True, message="generation was paused"))
        elif mode == "retract":
            scheduler.merge_last_batch()
            for request in list(scheduler.requests.values()):
                if request.row != NO_ROW:
                    scheduler.retract(request, "generation is paused")
        # No step walks over the queue now: the reasons that the last walk found are of the past.
        scheduler.history.begin_walk()
        for id in scheduler.requests:
            self._core.note(id, EventKind.WAITING_REASON, WHY, now)

    def end(self, now: float) -> None:
        """Go on, if generation is paused."""
        if self.mode is None:
            return
        self.mode = None
        self._core.hooks.detach(self)
        for id in self._core.scheduler.requests:
            self._core.note(id, EventKind.RELEASED, "generation goes on", now)

    def opened(self, message: GenerateRequest, now: float) -> None:
        """The history of a request says why it does not run."""
        self._core.note(message.id, EventKind.WAITING_REASON, WHY, now)

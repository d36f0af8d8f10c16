"""Pausing generation: no step runs until it is continued; requests can still come, end by their
deadlines, and be aborted.

The three modes treat open requests differently. `abort` ends them. `retract` moves running ones to
the queue, so that the KV memory is free and may be flushed, and the weights may change. `in_place`
changes nothing.
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
        # No step walks over the queue now, so the reasons of the last walk no longer apply.
        scheduler.history.begin_walk()
        for id in scheduler.requests:
            self._core.note(id, EventKind.WAITING_REASON, WHY, now)

    def end(self, now: float) -> None:
        """Continue, if generation is paused."""
        if self.mode is None:
            return
        self.mode = None
        self._core.hooks.detach(self)
        for id in self._core.scheduler.requests:
            self._core.note(id, EventKind.RELEASED, "generation goes on", now)

    def opened(self, message: GenerateRequest, now: float) -> None:
        """Record in the history of a request why it does not run."""
        self._core.note(message.id, EventKind.WAITING_REASON, WHY, now)

"""Pausing generation: no step runs until it goes on; requests still come, end by their deadlines, and can be aborted.

The three ways differ in what becomes of open requests: they are aborted, or those that run are taken back to the queue
(the KV memory is free then and may be flushed, the weights may change), or everything stays in place.
"""

from __future__ import annotations

from weft.messages.control import PauseMode
from weft.messages.requests import Abort
from weft.scheduler.history.request_history import Event, EventKind
from weft.scheduler.request import NO_ROW
from weft.scheduler.scheduler import Scheduler

WHY = "generation is paused until POST /continue_generation"


class Pause:
    def __init__(self) -> None:
        self.mode: PauseMode | None = None  # None: generation goes on

    def begin(self, scheduler: Scheduler, mode: PauseMode, now: float) -> None:
        """Pause, or pause in another way. Nothing is in flight."""
        self.mode = mode
        if mode == "abort":
            scheduler.abort(Abort(all=True, message="generation was paused"))
        elif mode == "retract":
            scheduler.merge_last_batch()
            for request in [one for one in scheduler.requests.values() if one.row != NO_ROW]:
                scheduler.retract(request, "generation is paused")
        scheduler.history.begin_walk()  # that nobody makes: the reasons of the last one are those of before
        for id in scheduler.requests:
            self.note_arrival(scheduler, id, now)

    def end(self, scheduler: Scheduler, now: float) -> None:
        """Go on, if it is paused."""
        if self.mode is not None:
            self.mode = None
            for id in scheduler.requests:
                scheduler.history.note(
                    id, Event(now, scheduler.num_steps, EventKind.RELEASED, "generation goes on")
                )

    def note_arrival(self, scheduler: Scheduler, id: int, now: float) -> None:
        """A request is open while generation is paused: its trace says why it does not run."""
        if self.mode is not None and id in scheduler.requests:
            scheduler.history.note(
                id, Event(now, scheduler.num_steps, EventKind.WAITING_REASON, WHY)
            )

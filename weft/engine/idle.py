"""How long an engine may sleep while requests are open and no step can run: all are held back, or generation is paused.

A message ends any sleep, and so does a grammar that is ready. Without one, the next thing to do is a deadline, or to
ask again the parts of the scheduler that can say no more than "not yet". They are asked
soon at first and ever more rarely, up to `LONGEST_S`: what waits for a moment is not late, and what waits for long
costs next to nothing.
"""

from __future__ import annotations

import math
from typing import Protocol

from weft.engine.device_jobs import Device
from weft.engine.input_gate import InputGate
from weft.engine.pause import Pause
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.scheduler import Scheduler

SHORTEST_S = 0.001
LONGEST_S = 0.02  # between two questions


class Engine(Protocol):
    """What is needed of `service/engine.py`."""

    scheduler: Scheduler
    grammar: GrammarPart
    input: InputGate
    pause: Pause
    device: Device
    flushes: list[tuple[float, int]]
    stop_at: float | None


class Waits:
    def __init__(self) -> None:
        self.current_s = 0.0
        self._patience_s = SHORTEST_S

    def something_came(self) -> None:
        """A message: the next step may find something to do."""
        self.current_s = 0.0
        self._patience_s = SHORTEST_S

    def stepped(self, engine: Engine, now: float, *, is_stuck: bool) -> None:
        """A step has been made, and found nothing to do if `is_stuck`."""
        if not is_stuck:
            self.something_came()
            return
        until = min(
            engine.scheduler.deadlines.next_s, *(when for when, _ in engine.flushes), math.inf
        )
        if engine.stop_at is not None:
            until = min(until, engine.stop_at)
        self.current_s = max(until - now, SHORTEST_S)
        if self._is_to_be_asked(engine):
            self.current_s = min(self.current_s, self._patience_s)
            self._patience_s = min(2 * self._patience_s, LONGEST_S)

    @staticmethod
    def _is_to_be_asked(engine: Engine) -> bool:
        if engine.device.is_busy:
            return True
        queue = engine.scheduler.waiting_queue
        return (
            engine.pause.mode is None
            and queue.has_candidates
            and len(queue) > len(engine.grammar.queue)
        )

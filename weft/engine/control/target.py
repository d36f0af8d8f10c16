"""The engine as control requests see it."""

from __future__ import annotations

from typing import Protocol

from weft.engine.control.profile import Profiler
from weft.engine.device_jobs import Device
from weft.engine.health import HealthChecks
from weft.engine.input_gate import InputGate
from weft.engine.pause import Pause
from weft.engine.processors import Processors
from weft.messages.status import Stats
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.features.vectors import VectorsPart
from weft.scheduler.scheduler import Scheduler


class ControlTarget(Protocol):
    """The parts of `engine/engine.py` that handlers use. `Engine` cannot be named here: it imports
    the handlers."""

    scheduler: Scheduler
    sessions: Sessions
    grammar: GrammarPart
    vectors: VectorsPart
    processors: Processors
    profiler: Profiler
    input: InputGate
    pause: Pause
    device: Device
    health: HealthChecks
    flushes: list[tuple[float, int]]  # deadline and call of flushes that wait for an idle engine
    audits: list[int]  # calls of audits that are to be made
    stop_at: float | None  # when open requests are aborted and the engine ends
    min_step_s: float  # that the caller of `step` lets pass from one step to the next

    @property
    def num_results(self) -> int:
        """Results of steps that have come."""
        ...

    def clock(self) -> float: ...

    def settle(self) -> None:
        """Take in all that is in flight."""
        ...

    def stats(self) -> Stats: ...

"""Journals of engines with steps of a known cost."""

from __future__ import annotations

from tests.sim.scene import SCENE
from weft.journal.recorder import RecordedEngine
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock
from weft.sim.run import EngineTarget, Run
from weft.sim.synthetic import Traffic, synthetic
from weft.sim.trace import Arrival, TokenSource

COST = CostModel(0.01, 1e-4, 1e-6)
TRAFFIC = Traffic(
    requests=30, rate=20.0, input_len="uniform:20:450", output_len="uniform:1:150", max_tokens=120
)


class Records(list[bytes]):
    """A journal in memory."""

    num_bytes = 0

    def flush(self) -> None:
        pass

    def rotate(self) -> None:
        pass


def record(
    clock_s: float = 0.0,
    arrivals: list[Arrival] | None = None,
    settings: SchedulerSettings = SCENE,
    overlap: int = 1,
) -> Records:
    """The journal of an engine that serves TRAFFIC or `arrivals`, on a clock that says `clock_s`
    when it begins."""
    records = Records()
    clock = VirtualClock()
    lengths = TrueLengths()
    clock.wait_until(clock_s)
    engine = RecordedEngine(
        settings,
        CostRunner(COST, clock, lengths),
        clock=clock,
        overlap=overlap,
        on_failure=lambda exc: None,
        sink=records,
        max_bytes=1 << 30,
    )
    engine.start_over()
    Run(EngineTarget(engine, clock), TokenSource(SCENE.vocab_size), lengths).play(
        arrivals or synthetic(TRAFFIC)
    )
    return records


def recorded_engine() -> tuple[Records, RecordedEngine]:
    """An engine that is driven by hand, and its journal."""
    records = Records()
    clock = VirtualClock()
    lengths = TrueLengths()
    engine = RecordedEngine(
        SCENE,
        CostRunner(COST, clock, lengths),
        clock=clock,
        overlap=0,
        on_failure=lambda exc: None,
        sink=records,
        max_bytes=1 << 30,
    )
    engine.start_over()
    return records, engine

"""One simulation of a machine with settings, at a level of load, and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from weft.capacity.machine import MeasuredMachine
from weft.capacity.workload import LeveledLoad
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.settings import SchedulerSettings
from weft.sim.curve import CostParts, StepCurve
from weft.sim.report import Slo, Summary, summarize
from weft.sim.run import Record, simulate


class LoadPoint(NamedTuple):
    """The figures at one level. Times are in seconds, as a client sees them."""

    level: float
    good_share: float  # requests within the bounds
    good_per_s: float
    requests_per_s: float
    output_per_s: float  # tokens
    ttft_s: tuple[float, float]  # p50, p99
    itl_s: tuple[float, float]
    refused: int
    retractions: int
    device_use: float  # share of the time
    row_use: float  # rows that decode, of all
    kv_use: float  # of the pool, in the step with the most
    hit_rate: float
    front_s: float  # mean time of a request in the front
    parts: CostParts  # what all steps together were spent on

    @classmethod
    def of(cls, level: float, summary: Summary, meter: MeteredCurve, **facts: float) -> LoadPoint:
        return cls(
            level=level,
            good_share=summary.good_share,
            good_per_s=_rate(summary.good_per_s),
            requests_per_s=_rate(summary.requests_per_s),
            output_per_s=_rate(summary.output_per_s),
            ttft_s=(summary.ttft_s[0], summary.ttft_s[2]),
            itl_s=(summary.itl_s[0], summary.itl_s[2]),
            refused=summary.refused,
            retractions=summary.retractions,
            device_use=_rate(summary.device_use),
            row_use=summary.row_use,
            kv_use=facts["kv_use"],
            hit_rate=summary.hit_rate,
            front_s=facts["front_s"],
            parts=meter.parts,
        )


def _rate(value: float) -> float:
    """0 where no request was served."""
    return 0.0 if math.isnan(value) else value


class MeteredCurve:
    """A curve as a `StepCost` that sums up what the steps were spent on."""

    def __init__(self, curve: StepCurve) -> None:
        self._curve = curve
        self._weights_s = 0.0
        self._compute_s = 0.0
        self._context_s = 0.0
        self._sample_s = 0.0
        self.most_context = 0

    def seconds(self, load: StepLoad) -> float:
        parts = self._curve.parts(load)
        self._weights_s += parts.weights_s
        self._compute_s += parts.compute_s
        self._context_s += parts.context_s
        self._sample_s += parts.sample_s
        self.most_context = max(self.most_context, load.context)
        return parts.total_s

    @property
    def parts(self) -> CostParts:
        return CostParts(
            weights_s=self._weights_s,
            compute_s=self._compute_s,
            context_s=self._context_s,
            sample_s=self._sample_s,
        )


@dataclass(frozen=True)
class TrialSettings:
    """What makes a request good, and a level bearable."""

    slo: Slo
    share: float = 0.95  # of the requests must be within `slo` at a level that is borne


class TrialPoint(NamedTuple):
    """What is simulated."""

    settings: SchedulerSettings
    level: float
    factor: float = 1.0  # the machine's speed relative to the usual one


def simulated(
    machine: MeasuredMachine, workload: LeveledLoad, wanted: TrialSettings, point: TrialPoint
) -> LoadPoint:
    """The figures of one simulation."""
    settings = point.settings
    cost = MeteredCurve(machine.curve)
    record = simulate(
        settings,
        cost,
        workload.arrivals(point.level),
        overlap=machine.overlaps,
        speed=machine.speed(point.factor),
    )
    front_s = with_front(record, machine)
    return LoadPoint.of(
        point.level,
        summarize(record, wanted.slo),
        cost,
        kv_use=cost.most_context / max(settings.num_pages * settings.page_size, 1),
        front_s=front_s,
    )


class PointWorkers(Protocol):
    """Processes that simulate."""

    num: int

    def run(self, points: Sequence[TrialPoint]) -> Sequence[LoadPoint]: ...


class LoadTrials:
    """Simulations of one machine under one workload. Each is run once. `workers`: they run what is
    asked for together; None: this process does."""

    def __init__(
        self,
        machine: MeasuredMachine,
        workload: LeveledLoad,
        wanted: TrialSettings,
        workers: PointWorkers | None = None,
    ) -> None:
        self.machine = machine
        self.workload = workload
        self.wanted = wanted
        self.num_run = 0
        self.num_at_once = 1 if workers is None else workers.num
        self._workers = workers
        self._known: dict[TrialPoint, LoadPoint] = {}

    def prepare(self, points: Iterable[TrialPoint]) -> None:
        """Simulate points that will be asked for, if several can be simulated at once."""
        if self._workers is None:
            return
        new = [point for point in dict.fromkeys(points) if point not in self._known]
        self.num_run += len(new)
        self._known |= zip(new, self._workers.run(new), strict=True)

    def point(self, settings: SchedulerSettings, level: float, factor: float = 1.0) -> LoadPoint:
        """The figures with these settings at this level, on the machine at `factor` times its
        speed."""
        point = TrialPoint(settings, level, factor)
        if point not in self._known:
            self.num_run += 1
            self._known[point] = simulated(self.machine, self.workload, self.wanted, point)
        return self._known[point]

    def bears(self, settings: SchedulerSettings, level: float, factor: float = 1.0) -> bool:
        """Whether enough requests are within the bounds."""
        return self.point(settings, level, factor).good_share >= self.wanted.share


def with_front(record: Record, machine: MeasuredMachine) -> float:
    """Add the time of the front to the times of a simulated run. Returns its mean."""
    front_s = machine.front.seconds(record.prompt_len.astype(np.float64))
    record.first_s += front_s
    record.end_s += front_s
    return float(front_s.mean()) if len(front_s) else 0.0

"""One simulation of a machine with settings, at a level of load, and its figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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


class LoadTrials:
    """Simulations of one machine under one workload. Each is run once."""

    def __init__(
        self, machine: MeasuredMachine, workload: LeveledLoad, wanted: TrialSettings
    ) -> None:
        self.machine = machine
        self.workload = workload
        self.wanted = wanted
        self.num_run = 0
        self._speeds: dict[float, object] = {}
        self._known: dict[tuple[SchedulerSettings, float, float], LoadPoint] = {}

    def point(self, settings: SchedulerSettings, level: float, factor: float = 1.0) -> LoadPoint:
        """The figures with these settings at this level, on the machine at `factor` times its
        speed."""
        key = (settings, level, factor)
        if key not in self._known:
            self._known[key] = self._simulated(settings, level, factor)
        return self._known[key]

    def bears(self, settings: SchedulerSettings, level: float, factor: float = 1.0) -> bool:
        """Whether enough requests are within the bounds."""
        return self.point(settings, level, factor).good_share >= self.wanted.share

    def _simulated(self, settings: SchedulerSettings, level: float, factor: float) -> LoadPoint:
        self.num_run += 1
        machine = self.machine
        cost = MeteredCurve(machine.curve)
        record = simulate(
            settings,
            cost,
            self.workload.arrivals(level),
            overlap=machine.overlaps,
            speed=machine.speed(factor),
        )
        front_s = with_front(record, machine)
        return LoadPoint.of(
            level,
            summarize(record, self.wanted.slo),
            cost,
            kv_use=cost.most_context / max(settings.num_pages * settings.page_size, 1),
            front_s=front_s,
        )


def with_front(record: Record, machine: MeasuredMachine) -> float:
    """Add the time of the front to the times of a simulated run. Returns its mean."""
    front_s = machine.front.seconds(record.prompt_len.astype(np.float64))
    record.first_s += front_s
    record.end_s += front_s
    return float(front_s.mean()) if len(front_s) else 0.0

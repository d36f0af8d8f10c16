"""The answer of a plan: the curve of goodput, the knee, settings, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import msgspec

from weft.capacity.axes.axis import Axis
from weft.capacity.fleet import FleetPoint, MachineFleet
from weft.capacity.knee import NO_LEVEL, around, find_knee
from weft.capacity.limits import Limit, what_limits
from weft.capacity.machine import MeasuredMachine
from weft.capacity.pool import least_kv_tokens
from weft.capacity.search import Candidate, Search, Searched
from weft.capacity.trial import LoadPoint, LoadTrials, TrialPoint, TrialSettings
from weft.capacity.workers import TrialTask, TrialWorkers
from weft.capacity.workload import LeveledLoad
from weft.scheduler.settings import SchedulerSettings

MILLION = 1e6
HOUR_S = 3_600.0


class CurvePoint(NamedTuple):
    """A level, and its goodput on a machine at its usual, its slowest and its fastest speed."""

    point: LoadPoint
    slow: LoadPoint
    fast: LoadPoint


class Range(NamedTuple):
    """Levels that are borne at the slowest and at the fastest speed of the machine; 0: none."""

    low: float
    high: float


class CapacityAnswer(NamedTuple):
    machine: MeasuredMachine
    unit: str  # of levels
    wanted: TrialSettings
    base: Candidate
    candidates: Sequence[Candidate]  # the best first
    is_complete: bool  # False: the search was stopped
    num_trials: int
    curve: Sequence[CurvePoint]  # of the best candidate
    knee: float  # level; 0: not even the lowest one is borne
    base_knee: float
    knee_range: Range
    knee_point: LoadPoint  # at the knee, or at the lowest level
    limit: Limit
    kv_tokens: int  # that would do
    fleet: Sequence[FleetPoint]
    per_million: float  # price of a million output tokens at the knee; 0: not known

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


class Question(NamedTuple):
    """What is asked of a machine."""

    workload: LeveledLoad
    wanted: TrialSettings
    axes: Sequence[Axis]  # that may be chosen: those that the user has not
    wanted_level: float = 0.0  # the load that must be borne if possible; 0: any
    num_machines: int = 1
    price_per_hour: float = 0.0  # of one machine


def answer(
    machine: MeasuredMachine,
    question: Question,
    stop: Callable[[], bool] = lambda: False,
    *,
    num_workers: int = 1,
) -> CapacityAnswer:
    """Search, and describe what was found. `stop` ends the search early. `num_workers`: simulations
    at a time."""
    workload = question.workload
    wanted = question.wanted
    with ExitStack() as stack:
        workers = None
        if num_workers > 1:
            workers = TrialWorkers(num_workers, TrialTask(machine, workload, wanted))
            stack.callback(workers.close)
        trials = LoadTrials(machine, workload, wanted, workers)
        search = Search(trials, question.axes, wanted_level=question.wanted_level, stop=stop)
        searched = search.run(machine.settings)
        return described(trials, searched, question, stop)


def described(
    trials: LoadTrials, searched: Searched, question: Question, stop: Callable[[], bool]
) -> CapacityAnswer:
    """The answer, once the candidates are ranked: also after real runs have ranked them anew."""
    machine = trials.machine
    workload = trials.workload
    levels = workload.levels
    best = searched.candidates[0]
    lowest = max(best.knee, 0)
    at_knee = trials.point(best.settings, levels[lowest])
    next_up = min(best.knee + 1, len(levels) - 1)
    above = trials.point(best.settings, levels[next_up])
    fleet: list[FleetPoint] = []
    if question.num_machines > 1:
        one = MachineFleet(machine, best.settings, workload, question.wanted, at_knee.level)
        fleet = one.points(question.num_machines, stop)
    output_per_s = fleet[0].output_per_s if fleet else at_knee.output_per_s
    per_million = 0.0
    if question.price_per_hour and output_per_s > 0:
        price = question.num_machines * question.price_per_hour
        per_second = price / HOUR_S
        per_million = per_second / output_per_s * MILLION
    return CapacityAnswer(
        machine=machine,
        unit=workload.unit,
        wanted=question.wanted,
        base=searched.base,
        candidates=searched.candidates,
        is_complete=searched.is_complete,
        num_trials=trials.num_run,
        curve=_curve(trials, best),
        knee=level_of(levels, best.knee),
        base_knee=level_of(levels, searched.base.knee),
        knee_range=_range(trials, best),
        knee_point=at_knee,
        limit=what_limits(above, question.wanted.slo),
        kv_tokens=least_kv_tokens(trials, best.settings, at_knee.level),
        fleet=fleet,
        per_million=per_million,
    )


def level_of(levels: Sequence[float], knee: int) -> float:
    return 0.0 if knee == NO_LEVEL else levels[knee]


def _curve(trials: LoadTrials, best: Candidate) -> list[CurvePoint]:
    levels = trials.workload.levels
    spread = trials.machine.spread
    shown = [levels[index] for index in around(levels, best.knee)]
    factors = (1.0, spread.slow, spread.fast)
    trials.prepare(
        [TrialPoint(best.settings, level, factor) for level in shown for factor in factors]
    )
    found = []
    for level in shown:
        usual = trials.point(best.settings, level)
        slow = trials.point(best.settings, level, spread.slow)
        fast = trials.point(best.settings, level, spread.fast)
        found.append(CurvePoint(usual, slow, fast))
    return found


def _range(trials: LoadTrials, best: Candidate) -> Range:
    levels = trials.workload.levels
    found = []
    for factor in trials.machine.spread:

        def bears(index: int, factor: float = factor) -> bool:
            return trials.bears(best.settings, levels[index], factor)

        knee = find_knee(bears, len(levels), best.knee)
        found.append(level_of(levels, knee))
    own = level_of(levels, best.knee)
    # With few requests, a slower machine may happen to do better.
    return Range(min(*found, own), max(*found, own))


def to_dict(found: CapacityAnswer) -> dict[str, Any]:
    """The answer for JSON. Its `machine` is the cost of another plan."""
    plain: dict[str, Any] = _plain(found)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, SchedulerSettings):
        return None  # the changes say what differs
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

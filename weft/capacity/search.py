"""Searches settings: one axis after the other, each value by a simulation at the level that the
best settings so far do not bear. It knows no axis."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.capacity.axes.axis import Axis, AxisValue
from weft.capacity.knee import find_knee
from weft.capacity.trial import LoadPoint, LoadTrials, TrialPoint
from weft.scheduler.settings import SchedulerSettings

GAIN = 1.01  # a value that brings less is not worth a change
ROUNDS = 2  # over all axes
NUM_RANKED = 3


class Candidate(NamedTuple):
    """Settings, and how they do."""

    settings: SchedulerSettings
    changes: Mapping[str, AxisValue]  # against the settings that the search began with
    knee: int  # index of the highest level that they bear, or NO_LEVEL
    point: LoadPoint  # at the level at which candidates are compared


class Searched(NamedTuple):
    candidates: list[Candidate]  # different ones, the best first
    base: Candidate  # the settings that the search began with
    is_complete: bool  # False: it was stopped


class Search:
    """`stop` ends it early; what was found until then counts. `wanted_level`: the load that must be
    borne if possible; 0: as much as possible."""

    def __init__(
        self,
        trials: LoadTrials,
        axes: Sequence[Axis],
        *,
        wanted_level: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._trials = trials
        self._axes = axes
        self._levels = trials.workload.levels
        self._wanted = wanted_level
        self._stop = stop

    def run(self, base: SchedulerSettings) -> Searched:
        best = base
        knee = self.knee(base, 0)
        base_knee = knee
        probe = self._probe(knee)
        seen: dict[SchedulerSettings, float] = {base: self._worth(base, probe)}
        is_complete = True
        for _ in range(ROUNDS):
            before = best
            for axis in self._axes:
                options = self._options(axis, best)
                for begin in range(0, len(options), self._trials.num_at_once):
                    if self._stop():
                        is_complete = False
                        break
                    some = options[begin : begin + self._trials.num_at_once]
                    self._prepare(some, probe)
                    for settings in some:
                        seen[settings] = self._worth(settings, probe)
                        if seen[settings] > GAIN * self._worth(best, probe):
                            best = settings
                if self._trials.bears(best, self._levels[probe]) and not self._stop():
                    knee = self.knee(best, probe)
                    probe = self._probe(knee)
            if best == before or not is_complete:
                break
        return self._ranked(base, base_knee, seen, probe, is_complete)

    def knee(self, settings: SchedulerSettings, first: int) -> int:
        """The index of the highest level that these settings bear."""

        def bears(index: int) -> bool:
            return self._trials.bears(settings, self._levels[index])

        return find_knee(bears, len(self._levels), first)

    def _options(self, axis: Axis, settings: SchedulerSettings) -> list[SchedulerSettings]:
        """The settings with each value of an axis that contradicts no other one."""
        options = []
        for value in axis.values(self._trials.machine, settings):
            changed = _changed(axis, settings, value)
            if changed is not None:
                options.append(changed)
        return options

    def _prepare(self, several: Sequence[SchedulerSettings], index: int) -> None:
        """Simulate several settings at one level."""
        level = self._levels[index]
        self._trials.prepare([TrialPoint(settings, level) for settings in several])

    def candidate(
        self, settings: SchedulerSettings, base: SchedulerSettings, knee: int, probe: int
    ) -> Candidate:
        changes: dict[str, AxisValue] = {}
        for axis in self._axes:
            value = axis.value(settings)
            if value != axis.value(base):
                changes[axis.name] = value
        return Candidate(settings, changes, knee, self._trials.point(settings, self._levels[probe]))

    def _probe(self, knee: int) -> int:
        """The index of the level at which candidates are compared: the first that is not borne, or
        the one that is wanted if that is higher."""
        last = len(self._levels) - 1
        probe = min(knee + 1, last)
        if self._wanted:
            wanted = bisect_left(self._levels, self._wanted)
            probe = max(probe, min(wanted, last))
        return probe

    def _worth(self, settings: SchedulerSettings, probe: int) -> float:
        """Good requests in 10^6 s; where there are none, the closer to the bounds the better."""
        point = self._trials.point(settings, self._levels[probe])
        if point.good_per_s > 0:
            return 1e6 * point.good_per_s
        late = point.ttft_s[0] + point.itl_s[0]
        if math.isnan(late):
            return 0.0
        return 1 / (1 + late)

    def _ranked(
        self,
        base: SchedulerSettings,
        base_knee: int,
        seen: Mapping[SchedulerSettings, float],
        probe: int,
        is_complete: bool,
    ) -> Searched:
        """The best settings, all compared at the same level. Of several that do exactly as well,
        only the one with the fewest changes: a setting that is changed needs a reason."""
        first = sorted(seen, key=lambda one: -seen[one])[: 2 * NUM_RANKED]
        if base not in first:
            first.append(base)
        self._prepare(first, probe)
        by_worth: dict[float, Candidate] = {}
        for settings in first:
            worth = self._worth(settings, probe)
            candidate = self.candidate(settings, base, base_knee, probe)
            known = by_worth.get(worth)
            if known is None or len(candidate.changes) < len(known.changes):
                by_worth[worth] = candidate
        found = []
        for worth in sorted(by_worth, reverse=True)[:NUM_RANKED]:
            one = by_worth[worth]
            if one.changes:
                one = one._replace(knee=self.knee(one.settings, max(probe - 1, 0)))
            found.append(one)
        found.sort(key=lambda one: (-one.knee, -one.point.good_per_s))
        own = self.candidate(base, base, base_knee, probe)
        return Searched(found, own, is_complete)


def _changed(axis: Axis, settings: SchedulerSettings, value: AxisValue) -> SchedulerSettings | None:
    try:
        return axis.changed(settings, value)
    except ValueError:  # this value contradicts another setting
        return None

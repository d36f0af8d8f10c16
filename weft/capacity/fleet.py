"""Several machines with the same settings and a router, in virtual time: which router, how many
users, and when to add or remove a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.capacity.knee import NO_LEVEL, find_knee
from weft.capacity.machine import MeasuredMachine
from weft.capacity.trial import TrialSettings, with_front
from weft.capacity.workload import ChatUsers, LeveledLoad
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cluster import simulate_cluster
from weft.sim.report import Summary, summarize

ROUTERS = ("cache_aware", "round_robin", "total_tokens")
REQUESTS_OF_EACH = 2  # at least, of each user
ADD_AT = 0.8  # of the load at the knee
REMOVE_AT = 0.5


@dataclass(frozen=True)
class FleetPoint:
    """Machines and their router, at the most that they bear."""

    machines: int
    router: str
    level: float  # 0: not even the lowest
    good_share: float
    good_per_s: float
    output_per_s: float
    busiest: float  # the largest working time of a machine, divided by the mean
    running: float  # requests that run on each machine, on average

    @property
    def add_at(self) -> float:
        """Running requests on each machine at which another machine is due."""
        return ADD_AT * self.running

    @property
    def remove_at(self) -> float:
        return REMOVE_AT * self.running


class MachineFleet:
    """`machine`s with `settings`. `knee_level`: what one of them bears."""

    def __init__(
        self,
        machine: MeasuredMachine,
        settings: SchedulerSettings,
        workload: LeveledLoad,
        wanted: TrialSettings,
        knee_level: float,
    ) -> None:
        self._machine = machine
        self._settings = settings
        self._workload = workload
        self._wanted = wanted
        self._knee_level = knee_level

    def points(
        self, num_machines: int, stop: Callable[[], bool] = lambda: False
    ) -> list[FleetPoint]:
        """All routers for `num_machines`, the best first; and the best one for fewer machines."""
        found: list[FleetPoint] = []
        for router in ROUTERS:
            if not stop() or not found:
                found.append(self._at_knee(num_machines, router))
        found.sort(key=lambda point: (-point.level, -point.good_per_s))
        fewer = num_machines // 2
        while fewer > 1 and not stop():
            found.append(self._at_knee(fewer, found[0].router))
            fewer //= 2
        return found

    def _at_knee(self, num_machines: int, router: str) -> FleetPoint:
        levels = self._workload.levels
        tried: dict[int, Summary] = {}

        def bears(index: int) -> bool:
            if index not in tried:
                tried[index] = self._summary(num_machines, router, levels[index])
            return tried[index].good_share >= self._wanted.share

        guess = _index_of(levels, num_machines * self._knee_level)
        knee = find_knee(bears, len(levels), guess)
        if knee == NO_LEVEL:
            return FleetPoint(num_machines, router, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        at = tried[knee]
        return FleetPoint(
            machines=num_machines,
            router=router,
            level=levels[knee],
            good_share=at.good_share,
            good_per_s=at.good_per_s,
            output_per_s=at.output_per_s,
            busiest=at.busiest,
            running=at.row_use * self._settings.max_running_requests,
        )

    def _summary(self, num_machines: int, router: str, level: float) -> Summary:
        workload = self._workload
        if isinstance(workload, ChatUsers):
            at_least = round(REQUESTS_OF_EACH * level)
            workload = replace(workload, requests=max(workload.requests, at_least))
        record = simulate_cluster(
            self._settings,
            self._machine.curve,
            workload.arrivals(level),
            num_replicas=num_machines,
            method=router,
            overlap=self._machine.overlaps,
        )
        with_front(record, self._machine)
        return summarize(record, self._wanted.slo)


def _index_of(levels: Sequence[float], level: float) -> int:
    """The index of the highest of `levels` that is not above `level`."""
    return max(sum(each <= level for each in levels) - 1, 0)

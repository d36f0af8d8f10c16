"""Simulations in other processes give what this process gives, and those that will be needed run
together."""

from __future__ import annotations

import pytest

from tests.capacity.machines import MACHINE, SETTINGS, USERS, WANTED
from weft.capacity.axes.axis import SettingAxis
from weft.capacity.search import Search
from weft.capacity.trial import LoadTrials, TrialPoint, simulated
from weft.capacity.workers import TrialTask, TrialWorkers
from weft.config.options import SettingsError

ROWS = SettingAxis("max_running_requests", lambda machine, settings: (2, 4, 16))


class Together:
    """Workers in this process, which remember how many points came together."""

    num = 2

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, points):
        self.sizes.append(len(points))
        return [simulated(MACHINE, USERS, WANTED, point) for point in points]


def test_a_search_by_several_finds_the_same() -> None:
    workers = Together()
    trials = LoadTrials(MACHINE, USERS, WANTED, workers)
    assert str(Search(trials, [ROWS]).run(SETTINGS)) == str(
        Search(LoadTrials(MACHINE, USERS, WANTED), [ROWS]).run(SETTINGS)
    )
    assert workers.sizes[0] == 2
    before = trials.num_run
    trials.prepare([TrialPoint(SETTINGS, USERS.levels[0])] * 2)
    trials.point(SETTINGS, USERS.levels[0])
    assert trials.num_run <= before + 1


def test_another_process_gives_the_same_figures_and_its_end_is_an_error() -> None:
    workers = TrialWorkers(1, TrialTask(MACHINE, USERS, WANTED))
    try:
        point = TrialPoint(SETTINGS, USERS.levels[0])
        assert str(workers.run([point])) == str([simulated(MACHINE, USERS, WANTED, point)])
        for process in workers._pool._processes.values():
            process.kill()
            process.join()
        with pytest.raises(SettingsError, match="a process of the search was killed"):
            workers.run([point])
    finally:
        workers.close()

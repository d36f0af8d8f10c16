"""A short run of the random load that `scripts/soak` runs for long, and that it is the same each
time."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.driver import soak
from tests.soak.phases import KILL, PHASES, PICTURES, arrivals
from tests.soak.planted import PLANTED, is_noticed
from tests.soak.plants import PLANTS
from tests.soak.report import as_json, as_table, ends


@pytest.mark.slow
@pytest.mark.timeout(1_200)  # after each phase it waits until all is at rest
def test_a_server_under_random_load_and_faults_loses_nothing_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = asyncio.run(soak(0.12, seed=7, scale=0.1))
    found = as_json(report)
    assert not report.faults, as_table(found)
    audited = [phase.name for phase in report.phases if phase.audit is not None]
    assert audited == [PICTURES.name] * 2 + [phase.name for phase in PHASES]
    assert report.phases[-1].name == KILL.name
    assert sum(ends(report).values()) == found["requests"] > 100
    assert found["ends"].keys() >= {"complete", "abort", "left", "error 400"}
    assert "0 faults" in as_table(found)


def test_random_load_is_the_same_for_the_same_seed() -> None:
    for phase in PHASES:
        assert arrivals(phase, 10.0, "1/0") == arrivals(phase, 10.0, "1/0")
        assert arrivals(phase, 10.0, "1/0") != arrivals(phase, 10.0, "2/0")


# `scripts/soak --planted` tries all of them.
TRIED = ("pages_exchanged", "salt_ignored")


@pytest.mark.slow
@pytest.mark.parametrize("plant", TRIED)
def test_the_soak_run_notices_a_planted_fault(plant: str) -> None:
    assert is_noticed(plant)


def test_every_plant_tells_by_what_the_run_does() -> None:
    assert PLANTED.keys() == PLANTS.keys()
    for plant in PLANTED.values():
        assert any(plant.who in phase.mix for phase in PHASES)

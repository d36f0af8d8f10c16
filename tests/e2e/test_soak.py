"""A short run of the random load that `scripts/soak` runs for long, and that it is the same each time."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak import behaviour
from tests.soak.behaviour import Behaviour
from tests.soak.driver import soak, soak_planted
from tests.soak.phases import KILL, PHASES, Phase, arrivals
from tests.soak.plants import PLANTS
from tests.soak.report import as_json, as_table, ends


def test_a_server_under_random_load_and_faults_loses_nothing_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = asyncio.run(soak(0.12, seed=7, scale=0.1))
    found = as_json(report)
    assert not report.faults, as_table(found)
    assert [phase.name for phase in report.phases if phase.audit is not None] == [
        phase.name for phase in PHASES
    ]
    assert report.phases[-1].name == KILL.name
    assert sum(ends(report).values()) == found["requests"] > 100
    assert found["ends"].keys() >= {"complete", "abort", "left", "error 400"}
    assert "0 faults" in as_table(found)


def test_random_load_is_the_same_for_the_same_seed() -> None:
    for phase in PHASES:
        assert arrivals(phase, 10.0, "1/0") == arrivals(phase, 10.0, "1/0")
        assert arrivals(phase, 10.0, "1/0") != arrivals(phase, 10.0, "2/0")


PLANTED: dict[str, tuple[int, Behaviour, float]] = {
    # plant -> every how many calls it does wrong; of the behaviours of the run that which tells, and how often it comes
    "piece_behind_the_next": (20, behaviour.ask, 8),
    "tokens_exchanged": (50, behaviour.ask, 8),
    "pages_exchanged": (4, behaviour.greedy, 8),
    "token_changed_by_retraction": (1, behaviour.ask_for_much, 10),
    "token_lost_by_retraction": (1, behaviour.ask_for_much, 10),
    "leaving_not_told": (2, behaviour.leave_for_good, 2),
    "salt_ignored": (2, behaviour.salted, 4),
    "page_leaked": (400, behaviour.ask, 8),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_soak_run_notices_a_planted_fault(plant: str) -> None:
    every, who, rate = PLANTED[plant]
    assert any(who in phase.mix for phase in PHASES)
    phase = Phase(plant, {who: 1.0}, rate, frozenset({"503"}))
    assert asyncio.run(soak_planted(plant, every, phase, seconds=2.0)).num_faults


def test_where_nothing_is_planted_nothing_is_noticed() -> None:
    mix: dict[Behaviour, float] = {who: 1.0 for _, who, _ in PLANTED.values()}
    phase = Phase("none", mix, 8, frozenset({"503"}))
    report = asyncio.run(soak_planted("page_leaked", 10**9, phase, seconds=2.0, rounds=2))
    assert not report.faults


def test_every_plant_is_tried() -> None:
    assert PLANTED.keys() == PLANTS.keys()

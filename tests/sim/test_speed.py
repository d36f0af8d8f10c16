"""How long steps take on a machine that was disturbed while others were measured."""

from __future__ import annotations

import pytest

from weft.scheduler.pace.step_cost import CostModel, StepLoad
from weft.sim.fit import StepTime, WatchedCost
from weft.sim.speed import MachineSpeed, Stretch

# Usual for 1 s, nothing to do for 1 s, then half as fast for 2 s.
MACHINE = MachineSpeed([Stretch(0.0, 1.0, 1.0), Stretch(2.0, 4.0, 1.0)])


def test_the_steps_that_were_measured_take_as_long_as_then() -> None:
    assert MACHINE.seconds(1.0, 0.0) == pytest.approx(1.0)
    assert MACHINE.seconds(1.0, 2.0) == pytest.approx(2.0)


def test_many_short_steps_are_held_up_no_longer_than_one_long_one() -> None:
    now_s = 0.5
    for _ in range(100):
        now_s += MACHINE.seconds(0.02, now_s)
    assert now_s == pytest.approx(0.5 + MACHINE.seconds(2.0, 0.5)) == pytest.approx(3.0)


def test_behind_the_last_step_it_all_begins_anew() -> None:
    assert MACHINE.seconds(0.5, 5.0) == pytest.approx(MACHINE.seconds(0.5, 1.0)) == 0.5
    assert MACHINE.seconds(3.0, 3.0) == pytest.approx(1.0 + 2.0 + 1.0)


def test_a_machine_that_ran_nothing_has_the_usual_speed() -> None:
    assert MachineSpeed([]).seconds(0.3, 7.9) == pytest.approx(0.3)


def test_of_a_step_that_began_before_the_first_arrival_the_rest_counts() -> None:
    machine = MachineSpeed([Stretch(-1.0, 1.0, 1.0)])
    assert machine.seconds(0.25, 0.0) == pytest.approx(0.5)


def test_a_machine_can_be_taken_for_faster_at_each_moment() -> None:
    assert MACHINE.times(2.0).seconds(1.0, 2.0) == pytest.approx(1.0)
    assert MACHINE.times(2.0).times(0.5).seconds(1.0, 2.0) == pytest.approx(2.0)
    assert MACHINE.seconds(1.0, 2.0) == pytest.approx(2.0)


def test_its_spread_says_how_slow_and_how_fast_it_was_for_a_while() -> None:
    slow, fast = MACHINE.spread()  # 3 s of work in 4 s
    assert slow == pytest.approx((4 / 3) / 2)
    assert fast == pytest.approx(4 / 3)
    even = MachineSpeed([Stretch(i, i + 1.0, 1.0) for i in range(50)])
    assert even.spread() == pytest.approx((1.0, 1.0))


def test_steps_larger_than_any_that_was_measured_are_distinguished() -> None:
    cost = CostModel(0.0, 0.01)
    watched = WatchedCost(cost, [StepTime(10, 50, 1, 0.1), StepTime(100, 20, 1, 1.0)])
    assert watched.seconds(StepLoad(110, 0, 60)) == cost.seconds(StepLoad(110, 0, 60))
    assert watched.guessed_share == 0.0
    watched.seconds(StepLoad(110, 0, 500))
    assert watched.guessed_share == 0.5

"""How long steps may take for background requests: a multiple of what they would take alone."""

from __future__ import annotations

import pytest

from weft.scheduler.pace.room import StepRoom
from weft.scheduler.pace.step_cost import CostModel

COST = CostModel(step_s=0.010, token_s=0.001)


def after_steps(num: int, seconds: float, online_s: float, max_slowdown: float = 1.0) -> StepRoom:
    """A room after steps of this time, in which tokens of online requests took `online_s`."""
    room = StepRoom(max_slowdown)
    for number in range(num):
        room.planned(number, online_s)
        room.observe(number, seconds)
    return room


def test_without_online_tokens_a_step_alone_has_its_fixed_part_alone() -> None:
    room = after_steps(100, seconds=0.050, online_s=0.0, max_slowdown=2.0)
    assert room.bound_s(COST) == pytest.approx(0.020)


def test_steps_alone_are_longer_the_more_of_the_time_online_tokens_take() -> None:
    # Half of the time: alone, the other half would be the fixed part of steps.
    room = after_steps(2_000, seconds=0.050, online_s=0.025)
    assert room.bound_s(COST) == pytest.approx(0.020, rel=0.02)


def test_slower_steps_do_not_raise_the_bound() -> None:
    """Twice as many online requests are there at once when steps take twice as long."""
    bounds = []
    for seconds in (0.050, 0.100):
        tokens_s = seconds / 2
        room = after_steps(2_000, seconds, tokens_s)
        bounds.append(room.bound_s(COST))
    assert bounds[1] == pytest.approx(bounds[0], rel=0.05)


def test_steps_without_online_requests_say_nothing_of_those_with_some() -> None:
    room = StepRoom(1.0)
    for number in range(4_000):
        room.planned(number, 0.025 if number % 2 else 0.0)
        room.observe(number, 0.050)
    assert room.bound_s(COST) == pytest.approx(0.020, rel=0.03)


def test_old_steps_are_forgotten() -> None:
    room = after_steps(5_000, seconds=0.050, online_s=0.040)
    high = room.bound_s(COST)
    for number in range(5_000, 20_000):
        room.planned(number, 0.0)
        room.observe(number, 0.050)
    assert room.bound_s(COST) < high / 2


def test_a_step_whose_time_never_comes_counts_for_nothing() -> None:
    room = StepRoom(1.0)
    for number in range(0, 2_000, 2):
        room.planned(number, 9.0)  # the device failed on it
        room.planned(number + 1, 0.025)
        room.observe(number + 1, 0.050)
        room.observe(number, 0.050)
    assert room.bound_s(COST) == pytest.approx(0.020, rel=0.02)

"""How long requests are expected to wait: outputs, the steps to come, and the band around."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.calls import num_calls
from tests.scheduler.scenes import settings
from tests.scheduler.timed import STEP_S, TOKEN_S, timed_engine
from weft.scheduler.estimate import wait
from weft.scheduler.estimate.band import Calibration
from weft.scheduler.estimate.seen import MIN_LENGTHS, OutputsSeen
from weft.scheduler.pace.step_cost import StepLoad


def seen(*lengths: int) -> OutputsSeen:
    outputs = OutputsSeen()
    for length in lengths:
        outputs.note(length)
    return outputs


def test_an_output_that_ignores_its_end_is_expected_to_go_to_its_limit() -> None:
    outputs = seen(*range(1, 30))
    assert outputs.left(0, 100, stops=False) == 100
    assert outputs.left(40, 100, stops=False) == 60
    assert outputs.left(100, 100, stops=False) == 1


def test_before_outputs_have_ended_half_of_the_limit_is_expected_then_half_of_the_rest() -> None:
    outputs = seen(*[3] * (MIN_LENGTHS - 1))
    assert outputs.left(0, 100, stops=True) == 50
    assert outputs.left(20, 100, stops=True) == 40
    assert outputs.left(90, 100, stops=True) == 5


def test_an_output_becomes_as_long_as_the_mean_of_those_that_were_longer_than_it_is() -> None:
    outputs = seen(*[10] * 6, *[20] * 2, *[40] * 2)
    assert outputs.left(0, 500, stops=True) == pytest.approx((60 + 40 + 80) / 10)
    assert outputs.left(10, 500, stops=True) == pytest.approx((40 + 80) / 4 - 10)
    # Cut at its own limit: 30.
    assert outputs.left(10, 30, stops=True) == pytest.approx((40 + 60) / 4 - 10)
    # None was as long.
    assert outputs.left(60, 500, stops=True) == 220
    assert outputs.left(0, 5, stops=True) == 5


def test_only_outputs_that_might_have_stopped_say_how_long_others_become() -> None:
    world = timed_engine(max_running_requests=8)
    for number in range(MIN_LENGTHS + 2):
        world.send([number] * 20, max_new_tokens=4, ignore_eos=True, ttft_ms=60_000)
    world.run_dry(check=False)
    estimator = world.engine.services.deadlines._estimator
    assert estimator is not None
    assert estimator._outputs.left(0, 100, stops=True) == 50


@pytest.mark.parametrize("mixed_chunk", [True, False])
@pytest.mark.parametrize("max_slowdown", [2.5, 100.0])
def test_where_steps_cost_what_was_learnt_requests_wait_as_long_as_expected(
    mixed_chunk: bool, max_slowdown: float
) -> None:
    world = timed_engine(max_running_requests=5, mixed_chunk=mixed_chunk, num_pages=4_000)
    world.scheduler.apply(
        settings(
            max_slowdown=max_slowdown,
            prefix_cache=False,
            max_running_requests=5,
            mixed_chunk=mixed_chunk,
            num_pages=4_000,
        )
    )
    calibration = world.engine.services.deadlines.calibration
    learn = calibration.learn
    ratios: list[float] = []

    def note(expected_s: float, band: object, actual_s: float) -> None:
        ratios.append(actual_s / expected_s)
        learn(expected_s, band, actual_s)  # type: ignore[arg-type]

    calibration.learn = note  # type: ignore[method-assign]
    rng = random.Random(1)
    for burst in range(3):
        for number in range(12):
            prompt = [100 + 20 * burst + number] * rng.randrange(5, 90)
            world.send(
                prompt, max_new_tokens=rng.randrange(2, 20), ignore_eos=True, ttft_ms=600_000
            )
        for _ in range(rng.randrange(4, 30)):
            world.step(check=False)
    world.run_dry(check=False)
    assert len(ratios) == 36
    ratios.sort()
    # Later arrivals and rounding to steps move single ones.
    assert 0.85 <= ratios[18] <= 1.15
    assert ratios[3] >= 0.6
    assert ratios[-4] <= 1.5


def expected_s(world: EngineWorld, id: int, in_flight: StepLoad | None = None) -> float:
    estimator = world.engine.services.deadlines._estimator
    assert estimator is not None
    return estimator.first_tokens_s({id: math.inf}, world.time, [], in_flight)[id]


def test_a_step_that_runs_comes_first() -> None:
    world = timed_engine()
    id = world.send([7] * 30, max_new_tokens=2)
    later_s = expected_s(world, id, StepLoad(tokens=50, pairs=0)) - expected_s(world, id)
    assert later_s == pytest.approx(STEP_S + 50 * TOKEN_S, rel=0.05)


def test_the_engine_says_which_step_runs_where_steps_overlap() -> None:
    world = timed_engine(depth=1, max_running_requests=4)
    told: list[StepLoad | None] = []
    estimator = world.engine.services.deadlines._estimator
    assert estimator is not None
    first_tokens_s = estimator.first_tokens_s

    def listen(*arguments: Any) -> dict[int, float]:
        told.append(arguments[3])
        return first_tokens_s(*arguments)

    estimator.first_tokens_s = listen  # type: ignore[method-assign,assignment]
    world.send([1] * 20, max_new_tokens=30, ignore_eos=True)
    for _ in range(5):
        world.step(check=False)
    world.send([2] * 20, max_new_tokens=3, ttft_ms=60_000)
    world.run_dry(check=False)
    (in_flight,) = told
    assert in_flight is not None
    assert in_flight.tokens == in_flight.samples == 1


def test_of_a_prompt_that_is_cached_the_rest_is_to_be_computed() -> None:
    world = timed_engine(prefix_cache=True)
    world.send([77] * 60, max_new_tokens=1)
    world.run_dry(check=False)
    cached = world.send([77] * 60, max_new_tokens=1)
    assert STEP_S <= expected_s(world, cached) <= STEP_S + 5 * TOKEN_S
    world.run_dry(check=False)
    unknown = world.send([78] * 60, max_new_tokens=1)
    assert expected_s(world, unknown) == pytest.approx(STEP_S + 60 * TOKEN_S, rel=0.05)


def test_a_wait_for_memory_is_estimated_by_when_another_request_releases_it() -> None:
    world = timed_engine(num_pages=130, max_running_requests=20, context_length=120)
    for number in range(2):
        world.send([number] * 20, max_new_tokens=40, ignore_eos=True)
    for _ in range(3):
        world.step(check=False)
    waiting = [world.send([9 + n] * 20, max_new_tokens=40, ignore_eos=True) for n in range(4)]
    waits_s = [expected_s(world, id) for id in waiting]
    # Two at a time: a step of two takes 12 ms, an output 40 steps.
    round_s = 40 * (STEP_S + 2 * TOKEN_S)
    assert waits_s[0] == pytest.approx(round_s, rel=0.25)
    assert waits_s[3] == pytest.approx(2 * round_s, rel=0.25)


def test_a_wait_for_a_row_is_estimated_by_the_first_output_to_end() -> None:
    world = timed_engine(num_pages=4_000, max_running_requests=2)
    for number, num_new in enumerate((60, 30)):
        world.send([number] * 20, max_new_tokens=num_new, ignore_eos=True)
    for _ in range(3):
        world.step(check=False)
    waiting = world.send([9] * 20, max_new_tokens=4, ignore_eos=True)
    assert expected_s(world, waiting) == pytest.approx(28 * (STEP_S + 2 * TOKEN_S), rel=0.2)


def test_behind_those_that_are_played_waits_grow_with_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = timed_engine(max_running_requests=3, schedule_policy="shortest-prefill-first")
    ids = [world.send([n] * (20 + n % 2), max_new_tokens=4, ignore_eos=True) for n in range(90)]
    early, late = ids[40], ids[41]  # 21st of the short ones, and behind all of them
    exact_s = [expected_s(world, id) for id in (early, late)]
    assert exact_s[1] > 2 * exact_s[0]
    monkeypatch.setattr(wait, "MAX_PLAYED", 12)
    found_s = [expected_s(world, id) for id in (early, late)]
    assert found_s == pytest.approx(exact_s, rel=0.2)
    # Who stands far behind counts as the last.
    monkeypatch.setattr(wait, "MAX_COUNTED", 50)
    last_s = expected_s(world, late)
    assert last_s == pytest.approx(found_s[1] * 90 / 66, rel=1e-6)


@pytest.mark.parametrize("policy", ["deadline", "fair", "fair(key) > hrrn", "priority > fair"])
def test_the_work_of_an_estimate_is_bounded_however_many_wait(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "MAX_PLAYED", 12)
    monkeypatch.setattr(wait, "MAX_COUNTED", 24)
    world = timed_engine(max_running_requests=2, schedule_policy=policy)
    num = []
    for number in range(240):
        id = world.send([number] * 20, max_new_tokens=4, tenant=f"t{number % 3}", ttft_ms=90_000)
        if number in (79, 239):
            expected_s(world, id)
            num.append(num_calls(functools.partial(expected_s, world, id)))
    assert num[1] <= num[0] + 20


def test_a_band_leaves_one_in_twenty_on_either_side_though_errors_are_skewed() -> None:
    calibration = Calibration()
    rng = random.Random(4)
    num_below = num_above = 0
    for number in range(1_800):
        expected_s = rng.uniform(0.1, 9.0)
        actual_s = expected_s * (0.5 + rng.expovariate(0.7))
        band = calibration.band(expected_s)
        if number >= 300:
            num_below += actual_s < band.low_s
            num_above += actual_s > band.high_s
        calibration.learn(expected_s, band, actual_s)
    assert 0.035 * 1_500 <= num_below <= 0.065 * 1_500
    assert 0.035 * 1_500 <= num_above <= 0.065 * 1_500


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_time_outside_of_the_band_moves_the_bound_of_its_side_out(factor: float) -> None:
    calibration = Calibration()
    rng = random.Random(6)
    for _ in range(200):
        calibration.learn(1.0, calibration.band(1.0), math.exp(rng.gauss(0.0, 0.1)))
    below = calibration._below.width
    above = calibration._above.width
    calibration.learn(1.0, calibration.band(1.0), factor)
    assert (calibration._below.width > below) == (factor < 1)
    assert (calibration._above.width > above) == (factor > 1)


def test_a_band_finds_back_after_a_run_of_delays() -> None:
    calibration = Calibration()
    rng = random.Random(2)

    def learn(num: int, factor: float) -> int:
        num_within = 0
        for _ in range(num):
            actual_s = factor * math.exp(rng.gauss(0.0, 0.2))
            band = calibration.band(1.0)
            assert band.low_s <= band.likely_s <= band.high_s
            num_within += band.low_s <= actual_s <= band.high_s
            calibration.learn(1.0, band, actual_s)
        return num_within

    learn(300, 1.0)
    before = calibration.band(1.0)
    learn(40, 6.0)
    assert calibration.band(1.0).high_s > 1.5 * before.high_s
    assert learn(1_000, 1.0) >= 900
    after = calibration.band(1.0)
    assert after.high_s / after.low_s < 1.5 * before.high_s / before.low_s

"""The parts of a request's time: each moment is in one of them, and they say what it was."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest

from tests.engine.engine_world import EngineWorld
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.engine import explain as insight
from weft.engine.times import CAME, MAX_REASONS
from weft.messages.control import (
    BlockInput,
    ContinueGeneration,
    Explanation,
    LongestGap,
    PauseGeneration,
    UnblockInput,
)
from weft.plan.step import Plan
from weft.scheduler.times import NEVER

STEP_S = 0.25
TOKEN_S = 0.5


def cost(plan: Plan) -> float:
    return STEP_S + TOKEN_S * plan.num_tokens


def told(world: World, id: int) -> Explanation:
    found = insight.explain(world.scheduler, id, world.time)
    assert found is not None
    assert all(one.seconds > 0 for one in found.times)
    total_s = sum(one.seconds for one in found.times)
    assert math.isclose(total_s, found.stages.total_s, abs_tol=1e-6)
    return found


def parts(world: World, id: int) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for one in told(world, id).times:
        seconds[one.part] += one.seconds
    return {part: round(value, 6) for part, value in seconds.items()}


def timed(world: World, tick_s: float = 0.0) -> World:
    world.let_steps_cost(cost)
    world.tick_s = tick_s
    return world


def test_a_request_alone_computes_its_prompt_and_decodes() -> None:
    world = timed(World(settings(chunked_prefill_size=16)), tick_s=0.125)
    id = world.send(list(range(40)), max_new_tokens=5, ignore_eos=True)
    world.run_dry()
    assert parts(world, id) == {
        "queue": 0.125,
        "prefill": 3 * STEP_S + 40 * TOKEN_S,
        "prefill_between": 2 * 0.125,
        "first_decode": STEP_S + TOKEN_S,
        "decode": 3 * (STEP_S + TOKEN_S),
        "decode_between": 4 * 0.125,
    }
    (own,) = [one for one in told(world, id).times if one.part == "prefill"]
    assert own.detail == "40 tokens in 3 pieces"
    gap = told(world, id).longest_gap
    assert gap is not None
    assert gap.step == 3, "the first step after a token"
    assert gap.seconds == 0.125 + STEP_S + TOKEN_S, "the first step after a token"


def test_two_prompts_of_a_step_share_its_time_by_their_tokens() -> None:
    world = timed(World(settings()))
    long = world.send(list(range(30)), max_new_tokens=1)
    short = world.send(list(range(100, 110)), max_new_tokens=1)
    world.run_dry()
    step_s = STEP_S + 40 * TOKEN_S
    assert parts(world, long) == {"prefill": step_s * 3 / 4, "prefill_shared": step_s / 4}
    assert parts(world, short) == {"prefill": step_s / 4, "prefill_shared": step_s * 3 / 4}


def test_prompts_of_others_stop_the_tokens_of_a_request_and_the_gap_names_them() -> None:
    world = timed(World(settings()))
    first = world.send([1, 2], max_new_tokens=6, ignore_eos=True)
    world.step()
    world.step()
    world.send(list(range(100, 130)), max_new_tokens=1, rid="guest")
    world.run_dry()
    assert parts(world, first) == {
        "prefill": STEP_S + 2 * TOKEN_S,
        "first_decode": STEP_S + TOKEN_S,
        "decode": 4 * (STEP_S + TOKEN_S),
        "decode_stalled": STEP_S + 30 * TOKEN_S,
    }
    assert told(world, first).longest_gap == LongestGap(
        seconds=STEP_S + 30 * TOKEN_S + STEP_S + TOKEN_S,
        at_s=2 * (STEP_S + TOKEN_S) + 31 * TOKEN_S + 2 * STEP_S + TOKEN_S,
        step=2,
        what="step 2 took 15.250 s: 30 prompt tokens of guest",
    )


def test_prompts_that_are_mixed_into_its_steps_are_told_apart() -> None:
    world = timed(World(settings(mixed_chunk=True, chunked_prefill_size=16)))
    first = world.send([1, 2], max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    world.send(list(range(100, 130)), max_new_tokens=1)
    world.run_dry()
    found = parts(world, first)
    assert found["decode_mixed"] > 2 * 10 * TOKEN_S
    assert "decode_stalled" not in found


def test_the_queue_says_behind_whom_and_by_which_rule() -> None:
    world = timed(World(settings(max_running_requests=1)), tick_s=0.125)
    world.send([1], max_new_tokens=5, ignore_eos=True)
    world.step()
    waiting = world.send([2], max_new_tokens=1)
    world.run_dry()
    queue = [one for one in told(world, waiting).times if one.part == "queue"]
    assert [one.detail for one in queue] == [
        "as many requests run as --max-running-requests allows (1)",
        CAME,
    ]
    assert queue[1].seconds == 0.125


def test_many_reasons_for_waiting_are_told_as_one() -> None:
    world = timed(World(settings(num_pages=60, schedule_conservativeness=1.0)))
    ids = [world.send([20 * i + 5] * 30, max_new_tokens=20) for i in range(12)]
    world.run_dry()
    queue = [one for one in told(world, ids[-1]).times if one.part == "queue"]
    assert len(queue) == MAX_REASONS + 1
    assert queue[-1].detail.endswith("other reasons")


def test_a_request_that_was_taken_back_waits_again_and_is_computed_again() -> None:
    world = timed(World(settings(num_pages=90, schedule_conservativeness=0.0)), tick_s=0.5)
    ids = [world.send(list(range(20 * i, 20 * i + 10)), max_new_tokens=40) for i in range(3)]
    world.run_dry()
    found = [told(world, id) for id in ids]
    retracted = [one for one in found if one.retractions]
    assert retracted
    for one in retracted:
        again = {part.part: part for part in one.times}
        assert again["queue_again"].seconds > 0
        assert again["prefill_again"].seconds > 0
        assert again["queue_again"].detail.startswith("it was taken back ")
        assert one.longest_gap is not None
        assert one.longest_gap.seconds > again["queue_again"].seconds
        assert one.longest_gap.what.startswith("it was taken back: ")


def test_the_step_that_ran_when_a_request_came_is_remembered() -> None:
    world = timed(World(settings()))
    first = world.send([1, 2, 3], max_new_tokens=4, ignore_eos=True, rid="first")
    world.step()
    second = world.send([4], max_new_tokens=1)
    world.run_dry()
    assert (told(world, first).busy_until_s, told(world, first).busy_with) == (NEVER, "")
    one = told(world, second)
    assert one.busy_until_s == one.arrived_s == STEP_S + 3 * TOKEN_S
    assert one.busy_with == "step 0 took 1.750 s: 3 prompt tokens of first"


def test_a_gap_of_many_steps_tells_their_sum_and_one_without_steps_that_none_ran() -> None:
    world = timed(World(settings()))
    first = world.send([1, 2], max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    for number in range(3):
        world.send(
            [100 + 40 * number + token for token in range(30)], max_new_tokens=1, rid="guest"
        )
        world.step()
    world.step()
    gap = told(world, first).longest_gap
    assert gap is not None
    assert gap.seconds == 3 * (STEP_S + 30 * TOKEN_S) + STEP_S + TOKEN_S
    assert gap.what == (
        "its 4 steps took 46.500 s; the longest, step 4 took 15.250 s: 30 prompt tokens of guest"
    )
    world.time += 100.0
    world.run_dry()
    gap = told(world, first).longest_gap
    assert gap is not None
    assert gap.what.endswith("a token for each of 1 request; no step ran for 100.000 s")


def test_a_request_that_waits_for_the_prefix_of_another_says_so() -> None:
    world = timed(World(settings()))
    prompt = list(range(40))
    world.send(prompt, max_new_tokens=1)
    second = world.send(prompt, max_new_tokens=1)
    world.run_dry()
    (queue,) = [one for one in told(world, second).times if one.part == "queue"]
    assert queue.detail == "another request of this step computes its prefix"
    assert queue.seconds == STEP_S + 40 * TOKEN_S


def test_a_block_and_a_pause_are_told() -> None:
    world = EngineWorld(settings())
    timed(world, tick_s=0.25)
    running = world.send([1], max_new_tokens=9, ignore_eos=True)
    world.steps(2)
    world.tell(BlockInput(call=1))
    blocked = world.send([2], max_new_tokens=1)
    world.steps(2)
    world.tell(PauseGeneration(call=2, mode="in_place"))
    world.time += 8.0
    world.tell(ContinueGeneration(call=3))
    world.tell(UnblockInput(call=4))
    world.run_dry()
    assert parts(world, running)["paused"] == 8.0
    assert parts(world, blocked)["blocked"] > 8.0
    (blocked_part,) = [one for one in told(world, blocked).times if one.part == "blocked"][:1]
    assert blocked_part.detail


def test_a_request_that_waits_or_runs_has_the_times_so_far() -> None:
    world = timed(World(settings(max_running_requests=1)), tick_s=0.125)
    running = world.send([1], max_new_tokens=50, ignore_eos=True)
    waiting = world.send([2], max_new_tokens=1)
    for _ in range(4):
        world.step()
        world.time += 0.0625
        told(world, running)
        told(world, waiting)
    assert set(parts(world, waiting)) == {"queue"}
    assert {"decode", "decode_between"} < set(parts(world, running))


def test_with_overlap_an_admitted_request_waits_for_the_step_before() -> None:
    world = timed(World(settings(), depth=1))
    world.send([1], max_new_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    second = world.send(list(range(100, 108)), max_new_tokens=2, ignore_eos=True)
    world.run_dry()
    assert parts(world, second)["prefill"] == STEP_S + 8 * TOKEN_S


MODES: list[dict[str, Any]] = [
    {},
    {"chunked_prefill_size": 16},
    {"chunked_prefill_size": 16, "mixed_chunk": True},
    {"num_pages": 60, "schedule_conservativeness": 0.0},
    {"split_prefill_layers": 1, "num_layers": 4},
    {"num_stages": 2},
]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("changes", MODES, ids=lambda changes: "-".join(changes) or "plain")
def test_the_parts_add_up_whatever_happens(changes: dict[str, Any], depth: int) -> None:
    rng = random.Random(f"{changes} {depth}")
    world = RecordedWorld(settings(**changes), depth=depth)
    timed(world, tick_s=0.125)
    sent: list[int] = []
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = [rng.randrange(10, 290) for _ in range(rng.randrange(1, 50))]
            sent.append(world.send(prompt, max_new_tokens=rng.randrange(1, 20)))
        world.step()
        for id in sent[-4:]:
            told(world, id)
    world.run_dry()
    for id in sent:
        told(world, id)
    replayed = world.replay().engine.scheduler
    for id in sent:
        there = insight.explain(replayed, id, world.time)
        assert there is not None
        assert there.times == told(world, id).times
        assert there.longest_gap == told(world, id).longest_gap

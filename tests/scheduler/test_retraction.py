"""Whom a lack of memory hits, and how often."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from tests.seeds import seeds
from weft.scheduler.admission import careful_ratio
from weft.scheduler.request import RequestState
from weft.scheduler.retraction import cheapest


def decoding(world: World, *ids: int) -> None:
    """Step until these requests decode."""
    while any(world.request(id).state is not RequestState.DECODING for id in ids):
        world.step()


def test_taking_back_a_request_frees_what_no_other_shares_with_it() -> None:
    world = World(settings(page_size=4, num_pages=60))
    prefix = list(range(100, 120))
    first = world.send([*prefix, 1, 2], max_new_tokens=20, ignore_eos=True)
    decoding(world, first)
    kv = world.scheduler.kv
    assert kv.room.freed_tokens(world.request(first)) == 24  # 22 tokens and the next: 6 pages
    second = world.send([*prefix, 3, 4], max_new_tokens=20, ignore_eos=True)
    decoding(world, second)
    for id in (first, second):
        request = world.request(id)
        before = kv.room.available
        expected = kv.room.freed_tokens(request)
        world.scheduler.retract(request)
        assert kv.room.available == before + expected
    assert world.finished == {}
    world.run_dry()
    world.check_outputs()


def test_the_victim_is_not_the_request_that_shares_most_of_its_memory() -> None:
    world = World(settings())
    prefix = list(range(100, 160))
    alone = world.send(list(range(200, 260)), max_new_tokens=20, ignore_eos=True)
    sharing = [world.send([*prefix, i], max_new_tokens=20, ignore_eos=True) for i in range(2)]
    decoding(world, alone, *sharing)
    requests = [world.request(id) for id in (alone, *sharing)]
    assert cheapest(requests, world.scheduler.kv, 30, lambda request: 0).id == alone


def test_among_equals_the_victim_is_the_latest_that_was_not_retracted_before() -> None:
    world = World(settings())
    ids = [world.send([10 * i] * 20, max_new_tokens=20, ignore_eos=True) for i in range(3)]
    decoding(world, *ids)
    requests = [world.request(id) for id in ids]
    kv = world.scheduler.kv
    assert cheapest(requests, kv, 10, lambda request: 0).id == ids[2]
    requests[2].retractions = 1
    assert cheapest(requests, kv, 10, lambda request: 0).id == ids[1]
    assert (
        cheapest(requests, kv, 10, lambda request: int(request.id == ids[0])).id == ids[0]
    )  # a lower class
    requests[2].retractions = 0


def test_a_request_retracted_often_resumes_only_when_all_running_ones_have_what_they_need() -> None:
    assert careful_ratio(0.3, 0) == 0.3
    assert [careful_ratio(0.0, n) for n in range(1, 5)] == [0.125, 0.25, 0.5, 1.0]
    assert careful_ratio(0.4, 2) == 1.0


def test_a_retraction_leaves_room_for_a_while() -> None:
    world = World(settings(num_pages=100, context_length=100, schedule_conservativeness=0.0))
    for i in range(4):
        world.send([i], max_new_tokens=60, ignore_eos=True)
    steps: list[int] = []
    while world.has_work:
        before = world.scheduler.counters.num_retractions
        world.step()
        if world.scheduler.counters.num_retractions > before:
            steps.append(world.num_steps)
    assert steps
    assert all(np.diff(steps) >= 20)
    world.check_outputs()


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_nobody_is_retracted_again_and_again_and_little_is_computed_twice(
    seed: int,
) -> None:
    """Memory for a fifth of what is asked for, and a scheduler that promises nothing: the worst
    case for thrashing."""
    rng = random.Random(seed)
    changes = {
        "num_pages": 240,
        "context_length": 120,
        "max_running_requests": 10,
        "schedule_conservativeness": 0.0,
    }
    world = World(settings(page_size=rng.choice([1, 1, 2]), **changes), depth=rng.choice([0, 1]))
    for _ in range(60):
        prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 30))]
        world.send(prompt, max_new_tokens=rng.randrange(20, 85))
    world.run_dry(check=False)
    counters = world.scheduler.counters
    assert counters.num_retractions
    assert max(finish.retractions for finish in world.finished.values()) <= 4
    useful = counters.num_prompt_tokens - counters.num_cached_tokens + counters.num_generated_tokens
    computed_again = counters.num_prefilled_tokens - (
        counters.num_prompt_tokens - counters.num_cached_tokens
    )
    assert computed_again < 0.25 * useful
    world.check_idle()
    world.check_outputs()

"""Random arrivals, aborts, failures and tiny memories, with every invariant of the design checked after every step."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.world import EOS, VOCAB, World
from weft.messages.requests import Abort
from weft.scheduler.settings import SchedulerSettings


def random_settings(rng: random.Random) -> SchedulerSettings:
    page_size = rng.choice([1, 1, 2, 3, 4, 8, 16])
    num_pages = rng.choice([60, 100, 200, 300, 500]) // page_size + rng.choice([3, 6])
    chunk = rng.choice([None, page_size, 2 * page_size, 16, 33])
    if chunk is not None:
        chunk = max(chunk, page_size)
    return SchedulerSettings(
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=rng.choice([1, 2, 6, 12, 24]),
        context_length=rng.choice([40, 90, 160]),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        prefix_cache=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "lpm"]),
        max_prefill_tokens=rng.choice([page_size, 20, 64, 1000]) if chunk is None else max(chunk, 64),
        chunked_prefill_size=chunk,
        mixed_chunk=rng.random() < 0.5,
        max_queued_requests=rng.choice([5, 1000, 1000, 1000]),
        schedule_conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0]),
    )


def random_prompt(rng: random.Random, families: list[list[int]], longest: int) -> list[int]:
    head = rng.choice(families)[: rng.randrange(0, 60)] if rng.random() < 0.7 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
    return (head + tail)[:longest]


def run_random(seed: int, num_requests: int = 40) -> World:
    rng = random.Random(seed)
    settings = random_settings(rng)
    fails = {rng.randrange(5, 200) for _ in range(3)} if rng.random() < 0.2 else set()
    world = World(settings, depth=rng.choice([0, 1, 2]), fail_steps=fails)
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    crowd = rng.choice([2, 10, 40])  # as long as fewer wait, others come
    sent = 0
    while sent < num_requests or world.loop.has_work:
        if sent < num_requests and len(world.scheduler.waiting_queue) < crowd and rng.random() < 0.4:
            for _ in range(rng.choice([1, 1, 2, 8])):
                longest = world.scheduler.max_len * rng.choice([1, 1, 2, 4]) // 4
                prompt = random_prompt(rng, families, longest)
                max_new = rng.choice([None, 1, 2, 8, 20, 30, 40])
                if max_new is not None and rng.random() < 0.95:
                    max_new = max(1, min(max_new, world.scheduler.max_len - len(prompt)))
                world.send(
                    prompt,
                    max_new_tokens=max_new,
                    ignore_eos=rng.random() < 0.2,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                    salt=rng.choice(["", "", "", "other"]),
                )
                sent += 1
        if rng.random() < 0.02 and world.sent:
            world.scheduler.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
        if rng.random() < 0.001:
            world.scheduler.abort(Abort(all=True))
        world.step()
        assert world.num_steps < 500 * num_requests, "no end in sight"
    world.run_dry()
    world.step()
    world.check_idle()
    world.check_outputs()
    return world


@pytest.mark.parametrize("seed", range(120))
def test_random_schedule_keeps_every_invariant(seed: int) -> None:
    run_random(seed)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = dict.fromkeys(["retractions", "evictions", "hits", "aborted", "refused", "failed"], 0)
    for seed in range(60):
        world = run_random(seed)
        stats = world.scheduler.stats()
        reached["retractions"] += stats.total_retractions
        reached["evictions"] += stats.total_evicted_tokens
        reached["hits"] += stats.total_cached_tokens
        reached["aborted"] += stats.total_aborted
        reached["refused"] += sum(finish.status in (400, 503) for finish in world.finished.values())
        reached["failed"] += len(world.failures)
    assert min(reached.values()) > 20, reached

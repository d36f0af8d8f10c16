"""Policies, and plain lists that order requests as they do."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.scheduler.random_worlds import random_prompt
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from weft.scheduler.request import Request

Key = Callable[[World, Request], float]


def cached(world: World, request: Request) -> int:
    usable = request.packed[: (request.fill_len - 1) * 4]
    return world.scheduler.kv.cache.peek(request.cache_key(usable))


TWINS: dict[str, Key] = {
    "fcfs": lambda world, request: request.spec.arrival_order,
    "lpm": lambda world, request: -cached(world, request),
    "shortest-prefill-first": lambda world, request: request.fill_len - cached(world, request),
    "hrrn": lambda world, request: (
        (request.spec.arrival_s - world.time) / (request.fill_len - cached(world, request))
    ),
    "lof": lambda world, request: -(request.max_len - request.spec.prompt_len),
    "priority": lambda world, request: -request.message.priority,
}


def order(world: World) -> list[int]:
    return [request.id for request in world.scheduler.waiting_queue.order(world.time)]


def busy_world(policy: str, seed: int = 0, num_waiting: int = 200, **changes: object) -> World:
    """Some requests have run, more wait; some prefixes are cached, some are evicted."""
    rng = random.Random(seed)
    world = World(
        settings(
            **{
                "schedule_policy": policy,
                "num_pages": 300,
                "page_size": rng.choice([1, 4]),
                **changes,
            }
        )
    )
    families = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    for number in range(num_waiting):
        world.send(
            random_prompt(rng, families, 90),
            max_new_tokens=rng.randrange(1, 20),
            priority=rng.randrange(3),
            user=rng.choice("abc"),
            salt=rng.choice(["", "", "other"]),
        )
        if number < num_waiting // 2 or number % 10 == 0:
            world.step()
    return world

"""Worlds and engines in which steps take time."""

from __future__ import annotations

from tests.engine.engine_world import EngineWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.plan.step import Plan

STEP_S = 0.010
TOKEN_S = 0.001


def cost(plan: Plan) -> float:
    return STEP_S + TOKEN_S * plan.num_tokens


def timed(world: World) -> World:
    """Steps take virtual time and nothing else does; what they cost has been seen."""
    world.tick_s = 0.0
    world.let_steps_cost(cost)
    for number in range(4):
        world.send([number] * 20, max_new_tokens=4, ignore_eos=True)
        world.run_dry(check=False)
    return world


def timed_engine(depth: int = 0, **changes: object) -> EngineWorld:
    values = {"max_slowdown": 2.5, "prefix_cache": False, **changes}
    world = EngineWorld(settings(**values), depth)
    timed(world)
    return world

"""Random batches, blocks, pauses, health checks and aborts by name among random requests: nothing
is lost, every invariant holds after every step, and the journal of it all is replayed bit for
bit."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.scheduler.flow_world import FlowWorld
from tests.seeds import chosen

WORLDS = (0, 6, 8, 9, 10, 11)


@cache
def driven(seed: int) -> FlowWorld:
    """A world whose work is done, in which every invariant has been checked."""
    world = FlowWorld(seed)
    puts_aside = seed >= 16  # which makes many files
    if puts_aside:
        world.put_aside_often()
    world.drive(12 if puts_aside else 40)
    return world


@pytest.mark.parametrize("seed", chosen(WORLDS, range(18)))
def test_blocks_and_pauses_lose_nothing_and_are_replayed_bit_for_bit(seed: int) -> None:
    world = driven(seed)
    replay = world.replay(check=True)
    assert seed >= 16 or replay.num_requests == len(world.sent)


def test_the_random_flow_reaches_what_it_is_meant_to() -> None:
    done = Counter[str]()
    for seed in WORLDS:
        world = driven(seed)
        done += world.done
        done["retracted"] += world.scheduler.stats().total_retractions
        done["refused"] += world.scheduler.stats().total_queue_full
    assert all(
        done[what] >= 3
        for what in ("batch", "BlockInput", "PauseGeneration", "HealthCheck", "retracted")
    ), done
    assert done["refused"] >= 1, done

"""Groups of layers with memory of their own: several beside each other, and one that is added from
outside."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.scheduler.group_world import both, prompt, serve_alone
from tests.scheduler.groups import states_of, windows_of
from tests.scheduler.random_worlds import run_random
from tests.scheduler.world import World
from tests.seeds import chosen, every_second
from weft.scheduler.settings import (
    HandoffSettings,
    TierSettings,
)

SCHEDULES = (1, 4, 5, 7)  # `scripts/soak --schedules` has as many as there is time for


# Windows beside states


@cache
def schedule(seed: int) -> Counter[str]:
    """What the schedule of a seed reaches, in which every invariant has been checked."""
    world = run_random(seed, 25, windows=True, states=True)
    stats = world.scheduler.stats()
    if seed % 4 == 0:
        world.replay(check=True)
    assert world.runner.states is not None
    return Counter(
        {
            "resumed": world.runner.states.num_resumed,
            "retractions": stats.total_retractions,
            "evicted states": stats.total_evicted_states,
            "evicted windows": stats.total_evicted_window_tokens,
        }
    )


@pytest.mark.parametrize("seed", chosen(SCHEDULES, range(18)))
def test_random_schedules_with_windows_beside_states_keep_every_invariant(seed: int) -> None:
    schedule(seed)


@pytest.mark.parametrize("seed", every_second([300, 302]))
def test_a_journal_with_windows_beside_states_may_be_put_aside_at_any_step(seed: int) -> None:
    run_random(seed, 12, windows=True, states=True, puts_aside=True).replay(check=True)


def test_the_random_schedules_reach_what_they_are_meant_to() -> None:
    reached = sum(map(schedule, SCHEDULES), Counter[str]())
    for what in ("resumed", "retractions", "evicted states", "evicted windows"):
        assert reached[what] >= 2, reached


def test_a_prefix_is_resumed_only_where_windows_and_states_can_be() -> None:
    world = World(both())
    tokens = prompt(1, 400)
    serve_alone(world, tokens)
    whole = serve_alone(world, [*tokens, *prompt(2, 50)])
    assert whole == 384  # the last page before the end of the prompt
    states = states_of(world.scheduler.kv)
    while states.snapshots.evict():
        pass
    assert serve_alone(world, [*tokens, *prompt(3, 50)]) == 0


def test_a_prefix_without_its_window_is_not_resumed_though_its_state_is_there() -> None:
    world = World(both())
    tokens = prompt(1, 400)
    serve_alone(world, tokens)
    windows = windows_of(world.scheduler.kv)
    windows.tails.evict(windows.pool.allocator.num_pages)
    assert len(states_of(world.scheduler.kv).snapshots)
    assert serve_alone(world, [*tokens, *prompt(3, 50)]) == 0


@pytest.mark.parametrize(
    "outside", [{"tiers": TierSettings()}, {"handoff": HandoffSettings(mode="prefill")}]
)
def test_kv_of_windows_beside_states_stays_in_the_pool(outside: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be stored outside of the pool"):
        both(**outside)

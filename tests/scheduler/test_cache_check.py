"""The check of cached K and V that all random worlds make."""

from __future__ import annotations

import pytest

from tests.scheduler.scenes import settings
from tests.scheduler.world import World


@pytest.fixture
def world() -> World:
    """Its cache has two branches of one beginning, and a namespace of its own."""
    world = World(settings())
    for tail, salt in ((20, ""), (30, ""), (20, "other")):
        world.send([10, 11, 12, tail, 21, 22], max_new_tokens=2, ignore_eos=True, salt=salt)
        world.run_dry()
    return world


def test_each_cached_token_is_compared(world: World) -> None:
    cache = world.scheduler.kv.cache
    slots = cache.tree.owned_pages().tolist()
    assert cache.page_size == 1
    assert len(slots) > 15
    assert any(node.children for node in cache.tree.nodes())
    for slot in slots:
        world.runner.state[slot] += 1
        with pytest.raises(AssertionError, match="not what its key says"):
            world.cache_check.check(cache)
        world.runner.state[slot] -= 1
    world.cache_check.check(cache)


def test_other_weights_make_what_is_cached_wrong(world: World) -> None:
    world.runner.weights += 1
    with pytest.raises(AssertionError, match="not what its key says"):
        world.cache_check.check(world.scheduler.kv.cache)


def test_what_a_launched_step_still_computes_is_not_compared(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world.scheduler.kv.cache
    slots = cache.tree.owned_pages()
    world.runner.state[slots[3]] += 1
    monkeypatch.setattr(world.runner, "pending_slots", lambda: slots[3:4])
    world.cache_check.check(cache)
    monkeypatch.setattr(world.runner, "pending_slots", lambda: slots[4:])
    with pytest.raises(AssertionError, match="not what its key says"):
        world.cache_check.check(cache)

"""Pictures in random worlds: each plan's positions, what the device has encoded, and every page of
the cache are compared with what the prompts say."""

from __future__ import annotations

import pytest

from tests.scheduler.random_worlds import run_random, run_timed
from tests.seeds import every_second, seeds, slow

KINDS = ["windows", "states", "drafts", "guesses", "splits", "puts_aside", "switches"]


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_pictures_survive_any_schedule(seed: int) -> None:
    world = run_random(seed, 25, media=True)
    world.replay(check=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", every_second([100, 102]))
def test_pictures_survive_any_schedule_beside_other_features(seed: int, kind: str) -> None:
    world = run_random(seed, 12, media=True, **{kind: True})
    world.replay(check=True)


@pytest.mark.parametrize("numbers", [range(12, 16), *slow([range(6)])])
def test_pictures_survive_where_time_cuts_prompts(numbers: range) -> None:
    """There the encoder works ahead, behind steps of running requests."""
    num_ahead = 0
    for seed in numbers:
        world = run_timed(seed, 12, media=True)
        world.replay(check=True)
        assert world.runner.media is not None
        num_ahead += world.runner.media.num_ahead
    assert num_ahead > 5

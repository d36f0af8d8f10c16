from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.world import World


@pytest.fixture(scope="module")
def memory_checked_every(request: pytest.FixtureRequest) -> int:
    """After how many steps random worlds look at each page, each node of the cache and each token
    in it. What a step does wrong there is still seen some steps later."""
    return 1 if request.config.option.all else 4


@pytest.fixture(autouse=True, scope="module")
def memory_of_worlds(memory_checked_every: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "memory_checked_every", memory_checked_every)
        yield

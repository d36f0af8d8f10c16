from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.shape.measure import parsed


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """Trees of sources stay until the end of a file: the collector would only look at them again
    and again."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()

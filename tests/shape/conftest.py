from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def uncollected() -> Iterator[None]:
    """Trees of sources stay: the collector would only look at them again and again."""
    gc.disable()
    yield
    gc.enable()

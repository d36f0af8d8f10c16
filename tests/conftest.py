from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from weft.observe.log import setup


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("weft").level)
    stream = io.StringIO()
    setup("info", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.getLogger("weft").setLevel(before[2])

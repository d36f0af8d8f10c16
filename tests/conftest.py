from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator

import pytest

from weft.observe.log import setup

# Read when a kernel is imported: the GPU's run in Triton's interpreter, which wants to be told how to round.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


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

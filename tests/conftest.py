from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG as HTTPX
from hypothesis import HealthCheck, settings

from weft.observe.log import setup

# No test depends on the speed of the machine, or on what is drawn this time.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")
HTTPX.connect = HTTPX.read = HTTPX.write = HTTPX.pool = 240.0

# Nor on the settings of who runs them.
for name in [name for name in os.environ if name.startswith("WEFT_") and name != "WEFT_CACHE"]:
    del os.environ[name]
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"

# Nor on the number of cores: torch's threads wait for each other by spinning, which costs thrice the time of a busy
# machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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

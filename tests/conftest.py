from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG as HTTPX
from hypothesis import HealthCheck, settings

from tests import running
from tests.freezing import own_freezing as own_freezing
from weft.observe.log import setup

# No test depends on the speed of the machine, or on what is drawn this time (but for those that ask
# for `fresh_seed`).
settings.register_profile(
    "same",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", settings.get_profile("same"), max_examples=100)
settings.load_profile("same")
HTTPX.connect = HTTPX.read = HTTPX.write = HTTPX.pool = 240.0
# Every HTTP client would read the certificates of all authorities: 40 ms of a processor, a thousand
# times.
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]

# Nor on the settings of who runs them.
for name in [name for name in os.environ if name.startswith("WEFT_") and name != "WEFT_CACHE"]:
    del os.environ[name]
# Nor on whether SmolLM2 is installed: the bundled model is the default here.
os.environ["WEFT_DEFAULT_MODEL"] = "weft-nano"
# A thousand processes need not compile weft each anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Processes that tests start find what tests define (tests.text.media_fakes).
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
# nohup lets what it starts ignore that its terminal is closed, and so do all processes below.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Nor on the number of cores: torch's threads wait for each other by spinning, which costs thrice
# the time of a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `weft` itself does

# Read when a kernel is imported: the GPU's run in Triton's interpreter, which wants to be told how
# to round.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@atexit.register
def _keep_the_last_line_the_last() -> None:
    """nanobind prints what Triton leaks when the interpreter ends. What is registered first runs
    last."""
    if any(name.startswith("triton") for name in sys.modules):
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(running)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.all:
        settings.load_profile("all")


class OwnThreadsText(io.StringIO):
    """Takes what the thread that made it writes: servers that the tests share may still have a line
    to log."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return len(text)
        return super().write(text)


@contextlib.contextmanager
def logging_to(stream: io.StringIO) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("weft").level)
    setup("info", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.getLogger("weft").setLevel(before[2])


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, by all threads."""
    with logging_to(io.StringIO()) as stream:
        yield stream


@pytest.fixture
def own_lines() -> Iterator[io.StringIO]:
    """What this thread logs."""
    with logging_to(OwnThreadsText()) as stream:
        yield stream

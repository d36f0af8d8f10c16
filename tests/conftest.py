from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import random
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

from tests.durations import DurationRecorder, read_durations
from tests.freezing import own_freezing as own_freezing
from tests.hanging import HangGuard, Offspring
from tests.pairs import left_out
from tests.workers import ForkedWorkers
from weft.observe.log import setup

USED = pytest.StashKey[bool]()  # whether a test asks for the fresh seed
OFFSPRING = pytest.StashKey[Offspring]()
LEFT = pytest.StashKey[list[str]]()  # commands of processes that tests have left running

# What is imported stays: while tests are collected, the collector would find nothing, and take a
# fifth of the time.
gc.disable()
# While tests run it waits for 10,000 new objects: each model and each world makes thousands.
gc.set_threshold(10_000, *gc.get_threshold()[1:])

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


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "seed of the schedules that are new in each run; the last line of a run tells it"
    parser.addoption("--fresh-seed", type=int, default=None, help=text)
    text = "run files of tests in so many processes; 0: all in this one"
    parser.addoption("--workers", type=int, default=0, metavar="N", help=text)
    parser.addoption("--all", action="store_true", help="run slow tests, too")
    text = "write the seconds of each file into tests/durations.json"
    parser.addoption("--record-durations", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fresh_seed is None:
        config.option.fresh_seed = random.SystemRandom().randrange(1, 10**9)
    if config.option.all:
        settings.load_profile("all")
    config.pluginmanager.register(HangGuard())
    config.stash[OFFSPRING] = Offspring()
    if config.option.workers:
        config.pluginmanager.register(ForkedWorkers(config.option.workers, read_durations()))
    if config.option.record_durations:
        config.pluginmanager.register(DurationRecorder())


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """No server outlives the tests that started it."""
    yield
    left = session.config.stash[OFFSPRING].left()
    session.config.stash[LEFT] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, and combinations of pairs that others have, unless all are asked
    for."""
    if config.option.all:
        return
    usual = [item for item in items if not item.get_closest_marker("slow")]
    gone = {*items}.difference(usual) | left_out(usual)
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    names = [getattr(item, "fixturenames", ()) for item in session.items]
    session.config.stash[USED] = any("fresh_seed" in one for one in names)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat the run, if the seed was used."""
    config = terminalreporter.config
    for command in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"ERROR: the tests have left a process running: {command}")
    if config.stash.get(USED, False):
        terminalreporter.write_line(
            f"what is new in each run: --fresh-seed {config.option.fresh_seed} repeats it"
        )


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A number that is another in each run, but for `--fresh-seed`."""
    return int(request.config.option.fresh_seed)


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

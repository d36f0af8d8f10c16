"""What a run of the tests can do that pytest alone cannot: several processes, slow tests only where
they are asked for, and an end for all that hangs or is left behind. `conftest.py` loads it; it
imports nothing of weft."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest

from tests.durations import DurationRecorder, read_durations
from tests.hanging import HangGuard, Offspring
from tests.pairs import left_out
from tests.workers import ForkedWorkers

USED = pytest.StashKey[bool]()  # whether a test asks for the fresh seed
OFFSPRING = pytest.StashKey[Offspring]()
LEFT = pytest.StashKey[list[str]]()  # commands of processes that tests have left running

# What is imported stays: while tests are collected, the collector would find nothing, and take a
# fifth of the time.
gc.disable()
# While tests run it waits for 20,000 new objects: each model and each world makes thousands.
gc.set_threshold(20_000, *gc.get_threshold()[1:])


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

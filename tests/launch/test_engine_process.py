"""The engine as a child process: what it has in common with its launcher, and what not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.config.machine import usable_cores
from weft.launch import engine_process
from weft.launch.engine_process import EngineProcess

STOP_S = 60.0


class Args:
    """Of an engine that waits for its launcher to hang up."""

    def to_json(self) -> bytes:
        return b"{}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    command = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
    monkeypatch.setattr(engine_process, "COMMAND", command)
    engine = EngineProcess()
    engine.begin(Args())  # type: ignore[arg-type]
    yield engine
    assert engine.stop(STOP_S) == 0


def test_signals_of_a_terminal_do_not_reach_the_engine(engine: EngineProcess) -> None:
    assert os.getpgid(engine.pid) == engine.pid != os.getpgrp()


def test_the_priority_of_the_launcher_is_the_engines(engine: EngineProcess) -> None:
    assert os.getpriority(os.PRIO_PROCESS, engine.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getsid(engine.pid) == os.getsid(0)
    own, its = (Path("/proc") / str(pid) / "autogroup" for pid in (os.getpid(), engine.pid))
    if own.exists():  # the kernel shares processors out between sessions
        assert its.read_text() == own.read_text()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors cannot be chosen here")
def test_the_engine_may_use_the_processors_of_its_launcher_and_counts_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
    monkeypatch.setattr(engine_process, "COMMAND", command)
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    os.sched_setaffinity(0, one)
    try:
        engine = EngineProcess()
        engine.begin(Args())  # type: ignore[arg-type]
        assert os.sched_getaffinity(engine.pid) == one
        assert usable_cores() == 1
        assert engine.stop(STOP_S) == 0
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_lower_priority_of_the_launcher_is_the_engines_too() -> None:
    code = (
        "import os, sys\n"
        "from weft.launch import engine_process as ep\n"
        "ep.COMMAND = (sys.executable, '-c', 'import sys; sys.stdin.buffer.read()')\n"
        "class Args:\n"
        "    def to_json(self): return b'{}'\n"
        "os.nice(3)\n"
        "engine = ep.EngineProcess()\n"
        "engine.begin(Args())\n"
        "its = os.getpriority(os.PRIO_PROCESS, engine.pid)\n"
        "print(its - os.getpriority(os.PRIO_PROCESS, os.getppid()))\n"
        "engine.stop(60.0)\n"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(done.stdout) == min(own + 3, 19) - own


def test_an_engine_that_was_never_told_to_begin_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(3600)")
    monkeypatch.setattr(engine_process, "COMMAND", command)
    engine = EngineProcess()
    assert engine.stop(STOP_S) == -signal.SIGKILL


def test_the_engine_imports_before_it_is_told_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import importlib.abc, os, sys\n"
        "class Seen(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'weft.launch.worker':\n"
        "            os._exit(7)\n"
        "sys.meta_path.insert(0, Seen())\n"
        "from weft.launch.start_worker import main\n"
        "main()\n"
    )
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", code))
    engine = EngineProcess()
    assert asyncio.run(engine.ended()) == 7
    assert engine.stop(STOP_S) == 7

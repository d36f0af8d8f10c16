"""A forked server has the processes of one that a command has started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.durations import ROOT
from tests.e2e.server import HANG_S, Server, wait_until
from tests.forked import ForkedServer, can_fork


@pytest.mark.skipif(not can_fork(), reason="servers are not forked here")
def test_front_and_engine_are_seen_and_end_as_those_of_a_command() -> None:
    server = Server("--dp-size", "2")
    assert isinstance(server.process, ForkedServer)
    front = psutil.Process(server.process.pid)
    assert front.cmdline()[:5] == [sys.executable, "-m", "weft", "serve", "--port"]
    assert len(server.engines) == 2
    for engine in server.engines:
        assert engine.ppid() == front.pid
        assert os.getpgid(engine.pid) == engine.pid
        assert "tests.forked" not in engine.cmdline()
        sockets = {one.laddr for one in engine.net_connections("tcp")}
        assert not sockets, "a file of the front is open in the engine"
    assert server.process.poll() is None
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    assert wait_until(lambda: not any(one.is_running() for one in server.engines))


def test_other_values_of_what_is_read_early_need_a_real_start() -> None:
    assert can_fork(dict(os.environ)) == (sys.platform == "linux")
    assert can_fork({**os.environ, "WEFT_API_KEY": "k"}) == (sys.platform == "linux")
    assert can_fork({**os.environ, "PYTHONPATH": "/elsewhere"}) == (sys.platform == "linux")
    assert not can_fork({**os.environ, "PYTHONHASHSEED": "1"})
    assert not can_fork({**os.environ, "OMP_NUM_THREADS": "7"})


@pytest.mark.skipif(not can_fork(), reason="servers are not forked here")
def test_a_copy_finds_what_its_own_path_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_this_test.py").write_text("raise SystemExit('found')")
    for path, said in ((str(tmp_path), "SystemExit: found"), ("", "there is no module")):
        monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{ROOT}")
        server = ForkedServer(["serve", "weft-nano", "--plugins", "control=of_this_test:NONE"])
        assert server.stderr is not None
        assert said in server.stderr.read()
        assert server.wait(HANG_S) == 2
        server.stderr.close()

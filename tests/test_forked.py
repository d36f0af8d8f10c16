"""A forked server has the processes of one that a command has started."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from tests.e2e.server import Server, wait_until
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
    assert not can_fork({**os.environ, "PYTHONPATH": "/elsewhere"})

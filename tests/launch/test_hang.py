"""An engine that hangs: seen within five seconds, told to everybody, and not waited for for ever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import zmq

from tests.launch.server_process import ServerProcess, StreamError, eventually, is_alive
from tests.launch.tiny_model import write_tiny_model
from weft.launch.pulse import Heart
from weft.messages.channel import Receiver
from weft.messages.codec import decode_from_engine
from weft.messages.control import Heartbeat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def reason(server: ServerProcess, path: str) -> str:
    """Why `path` answers 503; empty if it does not."""
    answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", timeout=5)
    return str(answer.json()["error"]["message"]) if answer.status_code == 503 else ""


def test_case_35_stopped_engine_is_seen_told_and_survived(model: Path) -> None:
    with ServerProcess(model, "--hang-timeout-s", "1", "--on-hang", "wait", behaviour="token_s=0.1") as server:
        stream = server.wait_ready().stream(200)
        next(stream)
        began = time.monotonic()
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert eventually(lambda: server.get("/health") == 503, 6)
        assert time.monotonic() - began < 5.5
        assert "no sign of life" in reason(server, "/health")
        assert "no sign of life" in reason(server, "/ready")
        with pytest.raises(StreamError, match="no sign of life"):
            list(stream)
        with pytest.raises(StreamError, match="503"):
            next(server.stream(1))
        os.kill(server.engine_pid, signal.SIGCONT)
        assert eventually(lambda: server.get("/health") == 200, 5)
        assert len("".join(server.stream(3))) == 3
        for event in ("error serve engine_hangs", "warning serve engine_recovered"):
            assert eventually(lambda event=event: any(event in line for line in server.lines), 2)


def test_case_35_hung_engine_ends_the_server_with_the_reason(model: Path) -> None:
    with ServerProcess(model, "--hang-timeout-s", "0.5", behaviour="stuck") as server:
        began = time.monotonic()
        with pytest.raises(StreamError, match="stood still in a step"):
            list(server.wait_ready().stream(5))
        assert server.end(8) == 1
        assert time.monotonic() - began < 12
        assert "stood still in a step" in server.lines[-1]
        assert not is_alive(server.engine_pid)
        assert server.socket_folders == []


def test_heart_beats_while_a_step_runs_and_tells_waiting_from_computing() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = Receiver(context, "inproc://heart", decode_from_engine, bind=True)
    heart = Heart(context, "inproc://heart")
    heart.start()

    def beats() -> list[Heartbeat]:
        return [message for message in receiver.drain() if isinstance(message, Heartbeat)]

    with heart:
        until = time.process_time() + 0.8
        while time.process_time() < until:
            pass
        computing = beats()
    with heart:
        time.sleep(1.2)
        waiting = beats()
    time.sleep(0.6)
    resting = beats()
    heart.stop()
    receiver.close()
    context.term()
    assert computing
    assert all(beat.idle_s == 0 for beat in computing)
    assert computing[-1].step_s > 0.4
    assert waiting[-1].idle_s > 0.4
    assert waiting[-1].step_s > waiting[-1].idle_s * 0.9
    assert resting[-1].step_s == 0

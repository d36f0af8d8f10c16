"""An engine that hangs: seen within five seconds, told to everybody, and not waited for for ever."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import httpx
import pytest
import zmq

from tests.launch.server_process import ServerProcess, StreamError, eventually, is_alive
from tests.launch.tiny_model import write_tiny_model
from weft.launch.heartbeat import ActivityMeter, HeartbeatSender
from weft.launch.run_queue import RunQueue
from weft.messages.channel import Receiver
from weft.messages.codec import decode_from_engine
from weft.messages.status import Heartbeat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def reason(server: ServerProcess, path: str) -> str:
    """Why `path` answers 503; empty if it does not."""
    answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", timeout=240)
    return str(answer.json()["error"]["message"]) if answer.status_code == 503 else ""


def test_stopped_engine_is_seen_told_and_survived(model: Path) -> None:
    """Open and new requests are told at the same time, long before the server gives the engine up."""
    with ServerProcess(
        model, "--hang-timeout-s", "600", "--on-hang", "wait", behaviour="token_s=0.1"
    ) as server:
        stream = server.wait_ready().stream(200)
        next(stream)
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert eventually(lambda: server.get("/health") == 503)
        assert "no sign of life" in reason(server, "/health")
        assert "no sign of life" in reason(server, "/ready")
        with pytest.raises(StreamError, match="no sign of life"):
            list(stream)
        with pytest.raises(StreamError, match="503"):
            next(server.stream(1))
        os.kill(server.engine_pid, signal.SIGCONT)
        assert eventually(lambda: server.get("/health") == 200)
        assert len("".join(server.stream(3))) == 3
        for event in ("error serve engine_hangs", "warning serve engine_recovered"):
            assert eventually(lambda event=event: any(event in line for line in server.lines))


def test_hung_engine_ends_the_server_with_the_reason(model: Path) -> None:
    with ServerProcess(
        model, "--hang-timeout-s", "0.5", "--hang-after-s", "2", behaviour="stuck"
    ) as server:
        with pytest.raises(StreamError, match="made no progress in a step"):
            list(server.wait_ready().stream(5))
        assert server.end() == 1
        assert "made no progress in a step" in server.lines[-1]
        assert not is_alive(server.engine_pid)
        assert server.socket_folders == []


def test_heartbeats_come_while_a_step_runs() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = Receiver(context, "inproc://heart", decode_from_engine, bind=True)
    heartbeat = HeartbeatSender(context, "inproc://heart")
    heartbeat.start()

    def beat() -> Heartbeat:
        assert receiver.wait(240)
        return [message for message in receiver.drain() if isinstance(message, Heartbeat)][-1]

    with heartbeat:
        assert 0 < beat().step_s < beat().step_s
    beat()  # it may be one of the step
    assert beat().step_s == 0
    heartbeat.stop()
    receiver.close()
    context.term()


def test_a_beat_tells_waiting_from_computing_and_from_lacking_a_processor() -> None:
    meter, is_queued = ActivityMeter(now=100.0, used_s=7.0), [False]
    queue = functools.partial(is_queued.__getitem__, 0)
    assert meter.beat(100.5, 7.5, 100.0, queue) == Heartbeat(step_s=0.5, idle_s=0.0)
    for half in range(1, 9):
        beat = meter.beat(100.5 + half / 2, 7.5 + half / 1_000, 100.0, queue)
        assert (beat.step_s, beat.idle_s) == (0.5 + half / 2, half / 2)
    assert (
        meter.beat(134.5, 7.51, 100.0, queue).idle_s == 4.0
    )  # late: it did not get to run, or was stopped
    is_queued[0] = True
    assert (
        meter.beat(135.0, 7.51, 100.0, queue).idle_s == 4.0
    )  # it wants to run: that is no waiting either
    assert meter.beat(135.5, 7.6, None, queue) == Heartbeat(step_s=0.0, idle_s=0.0)


def stat(state: str, used_s: float) -> str:
    ticks = int(used_s * os.sysconf("SC_CLK_TCK"))
    return f"7 (a ) R (x) {state} 1 7 7 0 -1 4194560 1 0 0 0 {ticks} 0 3 8 20 0 1 0 22 54 10"


def test_who_wants_to_run_and_gets_no_processor_is_held_up(tmp_path: Path) -> None:
    run_queue = RunQueue(7, but=10, proc=tmp_path)
    assert not run_queue.holds_up(0.5)  # there is no such process, or no /proc
    threads = [tmp_path / "7" / "task" / name for name in ("7", "8", "9", "10")]
    for thread in threads:
        thread.mkdir(parents=True)

    def look(used_s: float, *states: str) -> bool:
        (tmp_path / "7" / "stat").write_text(stat("S", used_s))
        for thread, state in zip(threads, states, strict=False):  # thread 9 has just ended
            (thread / "stat").write_text(stat(state, 0.0))
        (threads[-1] / "stat").write_text(stat("R", 0.0))  # who looks
        return run_queue.holds_up(0.5)

    look(1.0, "S", "S")
    assert look(1.1, "S", "R")  # one wants to run, and in half a second all have got a tenth
    assert not look(1.6, "S", "R")  # it computes
    assert not look(1.6, "S", "D")  # it waits for something else
    assert not look(1.6, "T", "T")  # it is stopped

"""The two processes from start to end, with an engine that has no model: readiness, drain, crashes,
nothing left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launch.server_process import ServerProcess, StreamError, eventually, is_alive
from tests.launch.tiny_model import write_tiny_model

ENDLESS = 200  # tokens; the context of the tiny model has 256
LATE = "600"  # seconds; nobody waits for them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def assert_nothing_left(server: ServerProcess) -> None:
    assert not is_alive(server.engine_pid)
    assert server.socket_folders == []


def assert_start_is_told(server: ServerProcess) -> None:
    """In a few lines, with the times."""
    text = "\n".join(server.lines)
    assert "· tiny (" in text
    assert "kv cache" in text
    assert "weights     1 byte loaded in 0.0 s" in text
    assert f"http://127.0.0.1:{server.port} " in server.lines[-1]
    assert len(server.lines) <= 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_idle_server_stops_at_once_and_leaves_nothing(model: Path, number: int) -> None:
    with ServerProcess(model, "--drain-s", LATE) as server:
        server.wait_ready()
        assert_start_is_told(server)
        assert server.get("/ready") == 200
        assert len(server.socket_folders) == 1
        assert server.socket_folders[0].stat().st_mode & 0o777 == 0o700
        server.signal(number)
        assert server.end() == 0
        assert_nothing_left(server)
        assert server.lines[-1] == "stopped"


def test_http_answers_that_it_is_not_ready_while_loading(model: Path) -> None:
    with ServerProcess(model, behaviour="loading") as server:
        paths = ("/ready", "/health", "/v1/models")
        assert eventually(lambda: [server.get(path) for path in paths] == [503] * 3)
        with pytest.raises(StreamError, match="503"):
            next(server.stream(1))
        server.gate.touch()
        server.wait_ready()
        assert [server.get(path) for path in paths] == [200] * 3


def test_signal_while_loading_stops_at_once(model: Path) -> None:
    with ServerProcess(model, behaviour="loading") as server:
        assert eventually(lambda: server.get("/ready") == 503)
        assert server.engine_pid, "the engine has come so far"
        server.signal(signal.SIGINT)
        assert server.end() == 0
        assert_nothing_left(server)


def test_signal_while_the_front_is_imported_stops_in_order(model: Path) -> None:
    with ServerProcess(model, behaviour="importing loading") as server:
        assert is_alive(server.engine_pid)
        assert len(server.socket_folders) == 1
        server.signal(signal.SIGINT)
        assert server.end() == 0
        assert_nothing_left(server)


def test_further_signals_do_not_keep_a_start_from_ending_in_order(model: Path) -> None:
    with ServerProcess(model, behaviour="importing loading stubborn") as server:
        assert server.engine_pid
        for _ in range(3):
            server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert_nothing_left(server)


def test_drain_lets_open_streams_end_and_takes_nothing_new(model: Path) -> None:
    with ServerProcess(model, "--drain-s", LATE, behaviour="gated") as server:
        stream = server.wait_ready().stream(15)
        next(stream)
        server.signal(signal.SIGTERM)
        assert eventually(lambda: server.get("/ready") == 503)
        with pytest.raises(StreamError, match="503"):
            next(server.stream(1))
        server.gate.touch()
        assert len("".join(stream)) == 14
        assert server.end() == 0
        assert_nothing_left(server)
        assert any(
            line.startswith(f"stopping: 1 open request, {LATE} s left") for line in server.lines
        )


def test_requests_longer_than_the_drain_end_with_an_error(model: Path) -> None:
    with ServerProcess(model, "--drain-s", "0.5", behaviour="gated") as server:
        stream = server.wait_ready().stream(ENDLESS)
        next(stream)
        server.signal(signal.SIGINT)
        with pytest.raises(StreamError, match="stopped"):
            list(stream)
        assert server.end() == 0
        assert_nothing_left(server)


def test_second_signal_ends_open_streams_at_once(model: Path) -> None:
    with ServerProcess(model, "--drain-s", LATE, behaviour="gated") as server:
        stream = server.wait_ready().stream(ENDLESS)
        next(stream)
        server.signal(signal.SIGINT)
        assert eventually(lambda: server.get("/ready") == 503)
        assert server.engine_pid, "the engine has come so far"
        server.signal(signal.SIGINT)
        with pytest.raises(StreamError, match="stopped"):
            list(stream)
        assert server.end() == 0
        assert_nothing_left(server)


def test_killed_engine_ends_every_stream_and_the_server(model: Path) -> None:
    with ServerProcess(model, behaviour="gated") as server:
        stream = server.wait_ready().stream(ENDLESS)
        next(stream)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(StreamError, match="engine has stopped"):
            list(stream)
        assert server.end() == 1
        assert_nothing_left(server)
        assert server.lines[-1].startswith("weft: The engine process was killed (SIGKILL)")


def test_requests_before_the_loss_of_an_engine_is_noticed_are_answered_and_the_server_ends(
    model: Path,
) -> None:
    with ServerProcess(model, behaviour="gated") as server:
        server.wait_ready()
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        assert eventually(lambda: not is_alive(engine))
        with pytest.raises(StreamError, match="engine has stopped"):
            list(server.stream(ENDLESS))
        assert server.end() == 1
        assert_nothing_left(server)


def test_killed_engine_ends_a_draining_server(model: Path) -> None:
    with ServerProcess(model, "--drain-s", LATE, behaviour="gated") as server:
        stream = server.wait_ready().stream(ENDLESS)
        next(stream)
        server.signal(signal.SIGINT)
        assert eventually(lambda: server.get("/ready") == 503)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(StreamError, match="engine has stopped"):
            list(stream)
        assert server.end() == 1


def test_killed_front_takes_the_engine_with_it_and_the_next_start_cleans_up(
    model: Path,
) -> None:
    with ServerProcess(model) as server:
        server.wait_ready()
        engine = server.engine_pid
        server.process.kill()
        assert eventually(lambda: not is_alive(engine))
        from weft.launch.engine_process import _remove_stale

        server.process.wait()
        assert len(server.socket_folders) == 1
        _remove_stale(server.tmp)
        assert server.socket_folders == []


def test_engine_that_does_not_hang_up_is_killed(model: Path) -> None:
    with ServerProcess(model, behaviour="stubborn") as server:
        server.wait_ready().signal(signal.SIGINT)
        assert server.end() == 0
        assert_nothing_left(server)


@pytest.mark.parametrize(("behaviour", "status"), [("refuse", 2), ("fail", 1)])
def test_reason_of_an_engine_that_cannot_start_is_the_last_word(
    model: Path, behaviour: str, status: int
) -> None:
    with ServerProcess(model, behaviour=behaviour) as server:
        assert server.end() == status
        assert server.lines[-1] == "weft: the weights are made of wool"
        assert_nothing_left(server)


def test_engine_that_ends_without_a_word_is_explained(model: Path) -> None:
    with ServerProcess(model, behaviour="crash") as server:
        assert server.end() == 1
        assert "ended with exit status 7" in server.lines[-1]
        assert_nothing_left(server)


def test_two_servers_do_not_disturb_each_other(model: Path) -> None:
    with ServerProcess(model) as one, ServerProcess(model, behaviour="gated") as other:
        one.wait_ready()
        stream = other.wait_ready().stream(5)
        next(stream)
        one.signal(signal.SIGTERM)
        assert one.end() == 0
        other.gate.touch()
        assert len("".join(stream)) == 4

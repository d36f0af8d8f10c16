"""Several engine processes behind one front, with engines that have no model: what is left when one
ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.launch.server_process import ServerProcess, StreamError, eventually, is_alive
from tests.launch.tiny_model import write_tiny_model
from weft.config.engine import EngineConfig
from weft.config.machine import Machine
from weft.config.options import SettingsError
from weft.launch.engine_group import part_of

ENDLESS = 200  # tokens; the context of the tiny model has 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def metric(server: ServerProcess, name: str) -> float:
    page = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith(f"weft:{name} ")]
    return float(line.rpartition(" ")[2])


def test_a_killed_engine_ends_its_requests_alone_and_is_started_again(model: Path) -> None:
    options = ("--dp-size", "2", "--load-balance-method", "round_robin")
    with ServerProcess(model, *options, behaviour="gated") as server:
        server.wait_ready()
        lost = server.stream(ENDLESS)
        kept = server.stream(15)
        next(lost)
        next(kept)
        first = server.pid_of(0)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(StreamError, match=r"engine 0 has stopped: .*SIGKILL"):
            list(lost)
        assert server.get("/health") == server.get("/ready") == 200
        server.gate.touch()
        assert len("".join(kept)) == 14
        assert len("".join(server.stream(15))) == 15, "the other engine takes all"
        assert eventually(lambda: server.pid_of(0) != first)
        assert metric(server, 'engine_restarts_total{dp_rank="0"}') == 1
        second = server.pid_of(0)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not any(map(is_alive, (second, server.pid_of(1))))
        assert server.socket_folders == []


def test_the_server_ends_when_no_engine_is_left(model: Path) -> None:
    options = ("--dp-size", "2", "--engine-restarts", "0")
    with ServerProcess(model, *options, behaviour="gated") as server:
        server.wait_ready()
        os.kill(server.pid_of(0), signal.SIGKILL)
        assert eventually(lambda: metric(server, 'engine_up{dp_rank="0"}') == 0)
        stream = server.stream(ENDLESS)
        next(stream)
        os.kill(server.pid_of(1), signal.SIGKILL)
        with pytest.raises(StreamError, match="stopped"):
            list(stream)
        assert server.end() == 1
        assert "SIGKILL" in server.lines[-1]


def test_the_server_does_not_start_if_an_engine_cannot(model: Path) -> None:
    with ServerProcess(model, "--dp-size", "3", behaviour="refuse") as server:
        assert server.end() == 2
        assert server.lines[-1] == "weft: the weights are made of wool"
        assert not any(is_alive(server.pid_of(rank)) for rank in range(3))


def test_a_drain_lets_the_streams_of_all_engines_end(model: Path) -> None:
    with ServerProcess(model, "--dp-size", "2", "--drain-s", "600", behaviour="gated") as server:
        server.wait_ready()
        streams = [server.stream(15) for _ in range(4)]
        for stream in streams:
            next(stream)
        server.signal(signal.SIGTERM)
        assert eventually(lambda: server.get("/ready") == 503)
        server.gate.touch()
        assert [len("".join(stream)) for stream in streams] == [14] * 4
        assert server.end() == 0
        assert server.socket_folders == []


def test_an_engine_can_be_named_in_header_and_body(model: Path) -> None:
    with ServerProcess(model, "--dp-size", "2") as server:
        server.wait_ready()
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        body = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(url, json={**body, "routed_dp_rank": 1}).status_code == 200
        assert httpx.post(url, json=body, headers={"X-data-parallel-rank": "1"}).status_code == 200
        for wrong in (
            httpx.post(url, json={**body, "routed_dp_rank": 2}),
            httpx.post(url, json={**body, "routed_dp_rank": 0, "data_parallel_rank": 1}),
            httpx.post(url, json=body, headers={"X-data-parallel-rank": "2"}),
            httpx.post(url, json=body, headers={"X-data-parallel-rank": "one"}),
        ):
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "routed_dp_rank"


def test_several_engines_take_kv_but_do_not_lend_it() -> None:
    machine = Machine(cores=2, free_bytes=1, total_bytes=1, gpus=(), no_gpu_reason="none")
    with pytest.raises(SettingsError, match="start several servers"):
        part_of(machine, 2, EngineConfig(disaggregation_mode="prefill"))
    assert part_of(machine, 2, EngineConfig(disaggregation_mode="decode")).cores == 1
    assert part_of(machine, 2, EngineConfig()).cores == 1

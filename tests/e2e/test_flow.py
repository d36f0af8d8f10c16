"""The flow of work of a real server: blocked, paused, asked for its health, and called over its RPC
socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, wait_until
from weft.config.options import SettingsError
from weft.launch.rpc import rpc


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--max-running-requests", "2")
    yield server
    assert server.stop() == 0


class Clients:
    """Completions that are asked for side by side."""

    def __init__(self, server: Server, number: int, max_tokens: int) -> None:
        self.answers: list[Any] = []
        self._threads = [
            threading.Thread(
                target=lambda: self.answers.append(
                    server.post("/generate", **self._body(max_tokens))
                )
            )
            for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _body(max_tokens: int) -> dict[str, Any]:
        return {
            "text": "Once",
            "sampling_params": {"max_new_tokens": max_tokens, "ignore_eos": True},
        }

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join()
        return self.answers


def cpu_use(server: Server, seconds: float) -> float:
    """Part of a core that the engine uses."""
    before = sum(server.engine.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(server.engine.cpu_times()[:2]) - before) / seconds


@pytest.mark.parametrize(
    ("stop", "go_on", "body"),
    [("/block", "/unblock", {}), ("/pause_generation", "/continue_generation", "in_place")],
)
def test_held_requests_are_explained_cost_no_cpu_and_go_on(
    server: Server, stop: str, go_on: str, body: Any
) -> None:
    server.post(stop, **({"mode": body} if body else {}))
    clients = Clients(server, 3, 4)
    assert wait_until(lambda: len(server.get("/requests")["requests"]) == 3)
    queue = server.get("/requests")
    assert {row["why"].split(" until POST ")[1] for row in queue["requests"]} == {go_on}
    assert (queue["queue"]["held_requests"], queue["queue"]["paused"]) == (
        (0, body) if body else (3, "")
    )
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    assert wait_until(lambda: cpu_use(server, 1.0) < 0.1)
    server.post(go_on)
    assert [len(answer["output_ids"]) for answer in clients.join()] == [4] * 3


def test_health_is_answered_while_others_wait_in_the_queue(server: Server) -> None:
    with server.slowed():
        clients = Clients(server, 6, 200)
        assert wait_until(lambda: server.load()["num_waiting_reqs"] >= 2)
        assert httpx.get(f"{server.url}/health_generate").status_code == 200
        assert server.load()["num_waiting_reqs"] >= 1  # so it has not waited for its turn
    clients.join()


def test_methods_are_called_over_the_socket_and_over_http(server: Server) -> None:
    pid = server.process.pid
    assert rpc("list_requests", pid=pid)["queue"]["max_running_requests"] == 2
    by_http = server.post("/rpc", method="list_requests")["result"]
    assert by_http["queue"]["max_running_requests"] == 2
    with pytest.raises(
        SettingsError, match="there is no method 'submit'; the methods are abort_request"
    ):
        rpc("submit", pid=pid)
    assert rpc("list_methods", pid=pid)["methods"].keys() >= {"abort_request", "explain_request"}
    assert rpc("flush_cache", {"timeout_s": 60.0}, pid=pid)["success"]

"""Metrics whose labels clients could multiply: more names of anything make no more lines than
forty do."""

from __future__ import annotations

import random
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.server.fake import HANG_S, RunningServer, running
from weft.config.server import ServerConfig


@pytest.fixture
def server():  # type: ignore[no-untyped-def]
    with running(ServerConfig(drain_s=1.0, tenant_by="user")) as made:
        yield made


def lines(http: httpx.Client) -> set[str]:
    """Each name with its labels."""
    found = set()
    for family in parse(http.get("/metrics").text):
        for sample in family.samples:
            found.add(f"{sample.name} {sorted(sample.labels.items())}")
    return found


def send_names(server: RunningServer, http: httpx.Client, rng: random.Random) -> None:
    """What a client can name, with names that were never there before."""
    name = f"name-{rng.getrandbits(64):x}"
    body = {"prompt": "a", "max_tokens": 1}
    for path in (f"/{name}", f"/v1/models/{name}", f"/v1/responses/{name}"):
        http.get(path)
        http.post(path)
    http.request(name.upper().replace("-", ""), "/v1/completions")
    for fields in (
        {"model": name},
        {"user": name, "cache_salt": name, "rid": name},
        {"priority": rng.randrange(-(2**31), 2**31)},
        {name: name},
        {"stop": [name], "temperature": name},
        {"session_params": {"id": name}},
        {"lora_path": name},
    ):
        http.post(
            "/v1/completions",
            json={**body, **fields},
            headers={"user-agent": name, name: name, "x-request-id": name, "host": "localhost"},
        )
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as odd:
        odd.sendall(f"{name} / HTTP/9.{rng.randrange(9)}\r\n\r\n".encode())
        while odd.recv(1 << 16):
            pass


def test_names_of_clients_make_no_lines_in_the_metrics(server: RunningServer) -> None:
    rng = random.Random(1)
    with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
        for _ in range(40):
            send_names(server, http, rng)
        lines(http)  # which is a request itself
        before = lines(http)
        assert not [line for line in before if "name-" in line.lower()]
        for _ in range(8):
            send_names(server, http, rng)
        assert lines(http) - before == set()

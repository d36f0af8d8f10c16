"""A real server that is killed goes on where it was: its sessions, their KV, and its stored
responses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.e2e.disk_cache import wait_for
from tests.e2e.kill_cache import MODEL, end
from tests.e2e.server import HANG_S, Server

PROMPT = [10 + number * 37 % 4_000 for number in range(1_000)]


def turn(server: Server, ids: list[int]) -> dict[str, Any]:
    told: dict[str, Any] = server.post(
        "/generate",
        input_ids=ids,
        session_params={"id": "s"},
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    )
    return told


def test_a_killed_server_goes_on_with_its_conversations(tmp_path: Path) -> None:
    options = (
        *MODEL,
        *("--cache-wait-ms", str(int(1_000 * HANG_S))),
        *("--cache-dir", str(tmp_path / "cache"), "--cache-write", "through"),
        *("--state-dir", str(tmp_path / "state")),
        *("--journal", str(tmp_path / "journal")),
    )
    server = Server(*options)
    server.post("/open_session", session_id="s")
    turn(server, PROMPT)
    response = server.post("/v1/responses", input="Hi", max_output_tokens=4)
    wait_for(server, "open", num_blocks=15)
    end(server)

    server = Server(*options)
    wait_for(server, "open", num_blocks=15)
    assert server.get(f"/v1/responses/{response['id']}") == response
    found = turn(server, [50, 51])
    assert found["meta_info"]["prompt_tokens"] == 1_014
    assert found["meta_info"]["cached_tokens"] >= 960, "the KV of the history came from the disk"
    kinds = {one["kind"]: one["records"] for one in server.get("/state")["kinds"]}
    assert kinds == {"response": 1, "session": 1}
    assert server.stop() == 0

    server = Server(*options, "--dp-size", "2")
    again = turn(server, [52])
    assert again["meta_info"]["prompt_tokens"] == 1_014 + 12 + 1
    for engine in server.engines:
        engine.kill()
    server.stop(signal.SIGKILL)

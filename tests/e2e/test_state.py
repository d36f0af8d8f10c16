"""A real server that is killed goes on where it was: its sessions, their KV, and its stored
responses."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.e2e import kill_state
from tests.e2e.disk_cache import wait_for
from tests.e2e.kill_cache import MODEL, end
from tests.e2e.server import HANG_S, Server, wait_until

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


def test_a_server_that_is_killed_at_random_has_all_that_it_told(tmp_path: Path) -> None:
    """`python -m tests.e2e.kill_state --kills 50` does the same more often."""
    assert kill_state.run(tmp_path, num_kills=1, seed=1) > 0


@contextlib.contextmanager
def serving(state: Path) -> Iterator[Server]:
    """A server with this state, which is killed in the end."""
    server = Server(*MODEL, "--state-dir", str(state))
    try:
        yield server
    finally:
        end(server)


def respond(server: Server, **body: object) -> Any:
    return server.post("/v1/responses", input="Hi", max_output_tokens=4, **body)


def status(ask: Callable[[], object]) -> int:
    try:
        ask()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code
    return 200


def test_a_full_disk_is_freed_by_clearing_the_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as server:
        stored = [respond(server) for _ in range(3)]
        # No file may grow beyond what there is: the same as a disk without room.
        process = psutil.Process(server.process.pid)
        unlimited = process.rlimit(psutil.RLIMIT_FSIZE)
        num_bytes = (state / "state.sqlite3-wal").stat().st_size
        process.rlimit(psutil.RLIMIT_FSIZE, (num_bytes, unlimited[1]))
        # The log has some room left.
        codes = itertools.dropwhile(
            lambda code: code == 200, (status(lambda: respond(server)) for _ in range(100))
        )
        assert next(codes) == 503
        assert server.get("/state")["fault"]
        assert respond(server, store=False)["status"] == stored[0]["status"]
        assert server.post("/state/clear")["responses"] >= len(stored)
        told = server.get("/state")
        assert told["kinds"] == []
        assert told["fault"] == ""
        first = stored[0]["id"]
        assert status(lambda: server.get(f"/v1/responses/{first}")) == 404
        kept = respond(server)
    with serving(state) as server:
        assert server.get(f"/v1/responses/{kept['id']}") == kept
        assert [one["records"] for one in server.get("/state")["kinds"]] == [1]


def test_a_state_that_is_removed_under_a_server_is_an_error_until_it_is_back(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    with serving(state) as server:
        respond(server)
        state.rename(tmp_path / "elsewhere")
        assert status(lambda: respond(server)) == 503
        assert "state.sqlite3 was removed or replaced" in server.get("/state")["fault"]
        (tmp_path / "elsewhere").rename(state)
        assert wait_until(lambda: not server.get("/state")["fault"])
        again = respond(server)
        shutil.rmtree(state)
        assert status(lambda: respond(server)) == 503
        assert any("was removed or replaced" in line for line in server.lines)
    with serving(state) as server:
        assert status(lambda: server.get(f"/v1/responses/{again['id']}")) == 404
        assert respond(server)["status"] == again["status"]

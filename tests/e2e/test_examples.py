"""Every example of `examples/`, run as a user would, against a server with the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTS = {
    "offline": "---",
    "stream_chat": " tokens]",
    "json_schema": "'is_builtin': ",
    "many_at_once": "prompt tokens from the cache",
    "explain": "finished: length, 8 tokens",
    "kv_events": " tokens are cached",
}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the server tells what its cache holds."""
    folder = tmp_path_factory.mktemp("events")
    return {"WEFT_KV_EVENTS": f"ipc://{folder}/events", "WEFT_KV_REPLAY": f"ipc://{folder}/replay"}


@pytest.fixture(scope="module")
def server(events: dict[str, str]) -> Iterator[Server]:
    config = {
        "publisher": "zmq",
        "endpoint": events["WEFT_KV_EVENTS"],
        "replay_endpoint": events["WEFT_KV_REPLAY"],
    }
    server = Server("--kv-events-config", json.dumps(config))
    yield server
    assert server.stop() == 0


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(PRINTS)
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"({name}.py)" in listed for name in names)


@pytest.mark.parametrize("name", PRINTS)
def test_example_prints_what_it_should(server: Server, events: dict[str, str], name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, **events, "WEFT_URL": server.url, "WEFT_KV_TOKENS": "4096"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout

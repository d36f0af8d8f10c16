"""Every example of `examples/`, run as a user would, against a server with the bundled model."""

from __future__ import annotations

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
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.stop() == 0


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(PRINTS)
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"({name}.py)" in listed for name in names)


@pytest.mark.parametrize("name", PRINTS)
def test_example_prints_what_it_should(server: Server, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "WEFT_URL": server.url, "WEFT_KV_TOKENS": "4096"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout

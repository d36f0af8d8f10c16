"""Every example of `examples/`, run as a user would, against a server with the bundled model."""

from __future__ import annotations

import gc
import json
import runpy
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


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of clients that live to the end
@pytest.mark.parametrize("name", PRINTS)
def test_example_prints_what_it_should(
    server: Server,
    events: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    small = {"WEFT_KV_TOKENS": "4096", "WEFT_THREADS": "1"}
    for variable, value in {**events, **small, "WEFT_URL": server.url}.items():
        monkeypatch.setenv(variable, value)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    gc.collect()
    assert PRINTS[name] in capsys.readouterr().out

"""The routes and commands of the expert distribution, over HTTP to a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.expert_record import Recording
from tests.server.fake import RunningServer, running
from weft.cli.main import main


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def engine(server: RunningServer) -> Recording:
    return Recording(server)


def test_a_record_is_started_stopped_and_dumped(server: RunningServer, engine: Recording) -> None:
    def ask(verb: str) -> Any:
        return httpx.post(f"{server.url}/{verb}_expert_distribution_record").json()

    assert ask("start") == {"recording": True}
    assert httpx.get(f"{server.url}/experts").json() == {
        "recording": True,
        "layers": [1],
        "prefill": [[4, 0, 2]],
        "decode": [[0, 1, 1]],
    }
    assert ask("stop") == {"recording": False}
    assert ask("dump") == {
        "layers": [1],
        "prefill": [[4, 0, 2]],
        "decode": [[0, 1, 1]],
        "file": "expert-distribution-0001.json",
    }


def test_a_model_without_experts_is_refused(server: RunningServer, engine: Recording) -> None:
    engine.has_experts = False
    start = httpx.post(f"{server.url}/start_expert_distribution_record")
    look = httpx.get(f"{server.url}/experts")
    for answer in (start, look):
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "nano has no experts"


def test_the_command_prints_a_line_for_each_layer(
    server: RunningServer, engine: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ctl", "experts", "start", "--url", server.url]) == 0
    assert main(["ctl", "experts", "show", "--url", server.url]) == 0
    assert capsys.readouterr().out.endswith("most 0: 4, 2: 3, 1: 1\nthey are counted\n")
    assert main(["ctl", "experts", "dump", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert "layer 1: prefill 6, decode 2; most 0: 4, 2: 3, 1: 1" in printed
    assert "expert-distribution-0001.json" in printed
    assert main(["ctl", "experts", "stop", "--url", server.url]) == 0

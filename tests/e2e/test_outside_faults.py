"""Faults of parts from outside end no request that does not use them, and never the server."""

from __future__ import annotations

import http.client
import threading
import urllib.error
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faulty_parts import PLUGINS
from tests.e2e.server import HANG_S, Server, run_weft, wait_until
from tests.pages import ROOT
from tests.seeds import one_in

HERE = Path(__file__).parent
PROMPT = list(range(20, 220))
STEPS = ("raise", "exit", "type", "shape")
# Values of a wrong kind, too, of hooks that have a value (`faulty_parts.py`).
HOOKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fits", "lock", "unlock", "take_row", "extend", "before_decode"), ()),
    **dict.fromkeys(("extend_running", "inserted", "shared", "released", "audit", "reset"), ()),
    **dict.fromkeys(("new_budget", "with_slots", "usage", "imbalance"), ("type",)),
    **dict.fromkeys(("available", "resumable"), ("type", "infinite")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    journal = tmp_path_factory.mktemp("faults") / "journal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
        server = Server(
            *("--plugins", PLUGINS, "--schedule-policy", "faulty_parts:FaultyPolicy"),
            *("--attention-backend", "faulty_parts:FaultyAttention"),
            *("--logit-processors", f"{HERE}/faulty_parts.py:FaultyProcessor"),
            *("--journal", str(journal)),
        )
        yield server
        assert server.stop() == 0
        returncode, errors = run_weft("replay", str(journal))
        assert returncode == 0, errors


@pytest.fixture(autouse=True)
def sound(server: Server) -> Iterator[None]:
    """Whatever a test has planted, the server answers as before afterwards."""
    yield
    plant(server, "", "")
    assert status(server) == 200, "\n".join(server.lines[-20:])
    server.post("/audit")


def plant(server: Server, part: str, fault: str) -> int:
    told: dict[str, Any] = server.post("/plant", part=part, fault=fault)
    return int(told["blocks"])


def status(server: Server, length: int = 3, **body: Any) -> int:
    """The status of a short generation."""
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    try:
        told = server.post("/generate", input_ids=PROMPT[:length], sampling_params=sampling, **body)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code
    assert len(told["output_ids"]) == 3
    return 200


def refused(server: Server, path: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.get(path)
    with caught.value as answer:
        return answer.code, answer.headers["content-type"]


@pytest.mark.parametrize("fault", ["raise", "exit", "shape", "infinite"])
def test_a_route_ends_its_own_request_with_an_error_of_the_api(server: Server, fault: str) -> None:
    assert refused(server, f"/faulty?fault={fault}") == (500, "application/json")


def test_a_stream_of_a_route_that_has_begun_ends(server: Server) -> None:
    assert server.get("/faulty") == {"ok": True}
    with pytest.raises(http.client.HTTPException):
        server.get("/faulty?fault=stream")


@pytest.mark.parametrize("fault", ["raise", "exit", "type"])
def test_a_control_request_ends_itself_alone(server: Server, fault: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        plant(server, "control", fault)
    with caught.value as answer:
        assert answer.code == 500
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("part", "faults"),
    [
        ("pass", (*STEPS, "infinite")),
        ("attention.forward", (*STEPS, "infinite")),
        ("attention.prepare", ("raise", "exit")),
        ("attention.narrow", ("raise", "exit")),
    ],
)
def test_faults_of_steps_end_the_requests_of_the_steps(
    server: Server, part: str, faults: tuple[str, ...]
) -> None:
    for fault in faults:
        plant(server, part, fault)
        # More often than a device may fail before the engine ends.
        assert [status(server) for _ in range(4)] == [500] * 4, (part, fault)


@pytest.mark.parametrize(
    "planted", one_in(3, zip(HOOKS, cycle(("raise", "exit")), strict=False)), ids=HOOKS
)
def test_faults_of_a_group_end_at_most_the_requests_concerned(
    server: Server, planted: tuple[str, str]
) -> None:
    hook, way_to_end = planted
    assert status(server, 150) == 200  # so that there is a prefix to resume
    for fault in (way_to_end, *HOOKS[hook]):
        plant(server, f"group.{hook}", fault)
        for _ in range(2):
            assert status(server, 150) in (200, 500), (hook, fault)
        plant(server, "", "")
        assert status(server) == 200, (hook, fault)


def test_a_running_request_goes_on_after_a_fault_of_a_group(server: Server) -> None:
    answers: list[int] = []
    with server.slowed(0.05):
        other = threading.Thread(target=lambda: answers.append(status(server, 5)))
        other.start()
        plant(server, "group.with_slots", "raise")
        plant(server, "", "")
        other.join(HANG_S)
    assert answers == [200]


@pytest.mark.parametrize("fault", ["raise", "exit", "shape", "infinite"])
def test_a_policy_is_left_after_its_fault(server: Server, fault: str) -> None:
    plant(server, "policy", fault)
    assert status(server) == 200
    server.post("/set_internal_state", server_args={"schedule_policy": "fcfs"})
    own = {"schedule_policy": "faulty_parts:FaultyPolicy"}
    server.post("/set_internal_state", server_args=own)


@pytest.mark.parametrize("fault", ["raise", "exit", "shape", "infinite"])
def test_a_logit_processor_ends_its_own_request(server: Server, fault: str) -> None:
    plant(server, "processor", fault)
    own = [{"name": "FaultyProcessor", "params": {}}]
    assert status(server, custom_logit_processor=own) == 500
    assert status(server) == 200


def a_fault_is_counted(server: Server, before: int) -> bool:
    """The request may have gone on without what is read, which fails later."""
    return wait_until(lambda: server.get("/cache")["faults"] > before)


def test_a_faulty_store_costs_time_and_no_token(server: Server) -> None:
    server.post("/cache/clear")
    assert status(server, 200) == 200
    server.post("/cache/save")
    num_blocks = plant(server, "", "")
    assert num_blocks >= 3
    for fault in ("raise", "exit", "type", "shape", "other"):
        server.post("/flush_cache")
        before = server.get("/cache")["faults"]
        plant(server, "store.get", fault)
        assert status(server, 200) == 200, fault
        assert a_fault_is_counted(server, before), fault
        plant(server, "", "")
        # What could not be read was forgotten, and is written again.
        server.post("/cache/save")
    for fault in ("raise", "exit"):
        plant(server, "store.clear", fault)
        server.post("/cache/clear")
        assert wait_until(lambda: server.get("/cache")["writing"] == 0)


def test_a_store_without_end_is_opened(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
        server = Server("--plugins", "tiers=faulty_parts:EndlessStore")
        assert wait_until(lambda: server.get("/cache")["disk"] == "open")
        assert status(server) == 200
        assert server.stop() == 0

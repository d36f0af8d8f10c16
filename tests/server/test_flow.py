"""Routes that control the flow of work: block, pause, calls by name, health; and a batch in one
message."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.server.fake import RunningServer, running
from weft.config.server import ServerConfig
from weft.messages.codec import ToEngine
from weft.messages.control import (
    ContinueGeneration,
    FreezeGC,
    HealthCheck,
    PauseGeneration,
    SetPolicy,
    UnblockInput,
)
from weft.messages.requests import BatchGenerate


@pytest.fixture
def sent(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[ToEngine]:
    """What goes to the engine."""
    messages: list[ToEngine] = []
    send = server.client.send

    def spy(message: ToEngine) -> None:
        messages.append(message)
        send(message)

    monkeypatch.setattr(server.client, "send", spy)
    monkeypatch.setattr(server.client.deliveries, "send", spy)
    return messages


def test_the_input_is_blocked_and_unblocked(http: httpx.Client) -> None:
    for route, state in (("/block", "blocked"), ("/unblock", "unblocked")):
        answer = http.post(route).json()
        assert answer == {"state": state, "held_requests": 0, "ramp_left_s": 0.0}


@pytest.mark.parametrize("route", ["/unblock", "/continue_generation"])
def test_a_ramp_in_the_body_is_refused_and_opens_nothing(
    http: httpx.Client, sent: list[ToEngine], route: str
) -> None:
    answer = http.post(route, json={"ramp_s": 60})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "ramp_s"
    assert f"{route}?ramp_s=" in answer.json()["error"]["message"]
    assert sent == []
    assert http.post(route, params={"ramp_s": 60}, json={}).status_code == 200
    [message] = sent
    assert isinstance(message, UnblockInput | ContinueGeneration)
    assert message.ramp_s == 60.0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_generation_is_paused_in_three_ways(http: httpx.Client, mode: str) -> None:
    answer = http.post("/pause_generation", json={"mode": mode})
    assert answer.json() == {"status": "ok", "paused": mode, "open_requests": 0}
    assert http.post("/continue_generation").json() == {
        "status": "ok",
        "paused": None,
        "open_requests": 0,
    }


def test_a_pause_without_a_mode_aborts_and_an_unknown_mode_names_those_there_are(
    http: httpx.Client, sent: list[ToEngine]
) -> None:
    assert http.post("/pause_generation", json={}).status_code == 200
    assert [message.mode for message in sent if isinstance(message, PauseGeneration)] == ["abort"]
    wrong = http.post("/pause_generation", json={"mode": "gently"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "mode"
    assert {"abort", "retract", "in_place"} <= set(
        re.findall(r"\w+", wrong.json()["error"]["message"])
    )


def test_control_requests_are_made_by_name(http: httpx.Client, sent: list[ToEngine]) -> None:
    switched = http.post("/rpc", json={"method": "set_policy", "params": {"policy": "lpm"}})
    assert switched.json() == {
        "result": {"success": True, "message": "no policy", "before": "fcfs"}
    }
    assert http.post("/rpc", json={"method": "freeze_gc"}).json() == {
        "result": {"frozen_objects": 7}
    }
    assert [type(message) for message in sent] == [SetPolicy, FreezeGC]
    refused = http.post("/rpc", json={"method": "set_policy", "params": {"policy": "magic"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "no policy"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"method": "__init__"},
            "there is no method '__init__'; the methods are abort_request, audit, ",
        ),
        ({"method": "set_policy"}, "set_policy: policy is missing; it is required"),
        ({"method": "freeze_gc", "params": {"what": 1}}, "there is no field 'what'"),
        ({"method": "freeze_gc", "params": {"call": 1}}, "there is no field 'call'"),
        ({"params": {}}, "method"),
    ],
)
def test_a_wrong_call_by_name_says_what_is_wrong(
    http: httpx.Client, sent: list[ToEngine], body: dict[str, Any], message: str
) -> None:
    answer = http.post("/rpc", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert not sent


def test_health_is_asked_of_the_engine_without_a_request(
    http: httpx.Client, sent: list[ToEngine]
) -> None:
    assert http.get("/health_generate").status_code == 200
    assert [type(message) for message in sent] == [HealthCheck]


@pytest.mark.parametrize(
    "route", ["/block", "/unblock", "/pause_generation", "/continue_generation", "/rpc"]
)
def test_only_the_administrator_controls_the_flow(route: str) -> None:
    with running(ServerConfig(api_key="user", admin_api_key="admin")) as server:
        answer = httpx.post(
            f"{server.url}{route}", json={}, headers={"authorization": "Bearer user"}
        )
        assert answer.status_code == 403


def test_prompts_of_one_request_and_their_completions_travel_in_one_message(
    http: httpx.Client, sent: list[ToEngine]
) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["one", "two"], "n": 3, "max_tokens": 2})
    assert len(answer.json()["choices"]) == 6
    [batch] = sent
    assert isinstance(batch, BatchGenerate)
    assert len(batch.prompts) == 2
    assert batch.prompt_of == [0, 0, 0, 1, 1, 1]
    assert not any(member.input_ids for member in batch.requests)
    assert [len(member.input_ids) for member in batch.members()] == [12] * 6


@pytest.mark.parametrize(
    ("method", "path", "there"),
    [
        ("POST", "/unblock?ramp=5", "its parameters are ramp_s"),
        ("POST", "/continue_generation?ramp_s=1&later=1", "its parameters are ramp_s"),
        ("POST", "/block?now=1", "it has none"),
        ("GET", "/requests?limits=5", "its parameters are limit"),
        ("POST", "/flush_cache?timeouts=1", "its parameters are timeout"),
        ("POST", "/cache/clear?all=1", "it has none"),
    ],
)
def test_control_routes_refuse_parameters_that_they_do_not_have(
    http: httpx.Client, method: str, path: str, there: str
) -> None:
    answer = http.request(method, path)
    name = path.rpartition("?")[2].rpartition("&")[2].partition("=")[0]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    plain = path.partition("?")[0]
    assert answer.json()["error"]["message"] == f"{plain} has no parameter {name!r}: {there}"

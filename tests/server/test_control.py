"""Routes that change how the engine runs, over HTTP to a fake engine."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import RunningServer, running
from weft.config.server import ServerConfig
from weft.messages import control
from weft.messages.codec import ToEngine
from weft.messages.status import Stats
from weft.server.admin.loads import LOADS_TIMEOUT_S

STATS = Stats(num_running=3, max_running_requests=4, num_waiting=5, kv_tokens=1_000, kv_used=250)


class Obedient:
    """Stands in the place of the fake engine's `send`: keeps control requests, and answers them."""

    def __init__(self, server: RunningServer) -> None:
        self._engine = server.engine
        self._send = server.engine.send
        self.got: list[Any] = []
        self.reports = ["writing", "done"]
        self.is_mute = False
        self.num_preparing = 0  # answers that the profiler is not ready

    def __call__(self, message: ToEngine) -> None:
        if self.is_mute:
            return
        reply = self._reply(message)
        if reply is None:
            self._send(message)
        else:
            self.got.append(message)
            self._engine.answer(reply)

    def _reply(self, message: ToEngine) -> Any:
        match message:
            case control.SlowDown(call=call):
                return control.SlowDownReply(call=call, before_s=0.25)
            case control.GetState(call=call):
                return control.GetStateReply(call=call, stats=STATS)
            case control.GetInternalState(call=call):
                return control.GetInternalStateReply(
                    call=call, server_args={"a": 1}, state={"b": None}, stats=STATS
                )
            case control.SetInternalState(call=call, server_args=asked):
                if "page_size" in asked:
                    return control.SetInternalStateReply(
                        call=call, success=False, name="page_size", message="a, b can"
                    )
                return control.SetInternalStateReply(
                    call=call, success=True, before=dict.fromkeys(asked, 1)
                )
            case control.ConfigureLogging(call=call, log_level=level):
                return control.ConfigureLoggingReply(
                    call=call, success=level != "loud", before="info", message="debug"
                )
            case control.StartProfile(call=call) if self.num_preparing:
                self.num_preparing -= 1
                return control.StartProfileReply(call=call, success=True, is_preparing=True)
            case control.StartProfile(call=call, output_dir=folder):
                is_inside = folder != "/etc"
                return control.StartProfileReply(
                    call=call, success=is_inside, trace="t.gz", message="not below"
                )
            case control.StopProfile(call=call):
                state: Any = self.reports.pop(0)
                return control.StopProfileReply(
                    call=call,
                    state=state,
                    num_steps=3,
                    trace="t.gz",
                    table="aten::mm",
                    message="nothing recorded",
                )
        return None


@pytest.fixture
def engine(server: RunningServer) -> Iterator[Obedient]:
    """What the server's engine was told."""
    logger = logging.getLogger("weft")
    level, logs_requests = logger.level, server.client.deliveries.log_requests
    obedient = Obedient(server)
    server.engine.send = obedient  # type: ignore[method-assign]
    yield obedient
    logger.setLevel(level)
    server.client.deliveries.log_requests = logs_requests


def error(answer: httpx.Response) -> Any:
    assert answer.status_code == 400
    return answer.json()["error"]


def test_steps_are_slowed_down_until_null_comes(engine: Obedient, http: httpx.Client) -> None:
    answer = http.post("/slow_down", json={"forward_sleep_time": 0.5})
    assert answer.json() == {"forward_sleep_time": 0.5, "before": 0.25}
    assert (
        http.post("/slow_down", json={"forward_sleep_time": None}).json()["forward_sleep_time"]
        is None
    )
    assert http.post("/slow_down", json={"forward_sleep_time": 0}).status_code == 200
    assert [message.forward_sleep_time for message in engine.got] == [0.5, None, None]
    for bad in (-1, 61, "x"):
        assert (
            error(http.post("/slow_down", json={"forward_sleep_time": bad}))["param"]
            == "forward_sleep_time"
        )
    assert http.post("/slow_down", json={}).status_code == 400
    assert len(engine.got) == 3


def test_settings_are_reported_and_changed(engine: Obedient, http: httpx.Client) -> None:
    told = http.get("/get_internal_state").json()
    assert (told["server_args"], told["state"], told["stats"]["num_waiting"]) == (
        {"a": 1},
        {"b": None},
        5,
    )
    asked = {
        "max_running_requests": 2,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.5,
        "mixed_chunk": True,
    }
    answer = http.post("/set_internal_state", json={"server_args": asked}).json()
    assert answer == {"updated": True, "server_args": asked, "before": dict.fromkeys(asked, 1)}
    assert engine.got[-1].server_args == asked
    assert type(engine.got[-1].server_args["max_running_requests"]) is int


def test_settings_that_cannot_be_changed_are_answered_with_what_can(
    engine: Obedient, http: httpx.Client
) -> None:
    refused = error(http.post("/set_internal_state", json={"server_args": {"page_size": 2}}))
    assert (refused["message"], refused["param"]) == ("a, b can", "page_size")
    num_asked = len(engine.got)
    for bad in (
        {"server_args": {}},
        {},
        {"server_args": {"a": [1]}},
        {"server_args": {"a": 10**30}},
        {"server_args": 1},
    ):
        error(http.post("/set_internal_state", json=bad))
    assert len(engine.got) == num_asked


def test_the_log_is_configured_here_and_in_the_engine(
    engine: Obedient, http: httpx.Client, server: RunningServer
) -> None:
    answer = http.post(
        "/configure_logging", json={"log_level": "error", "log_requests": True}
    ).json()
    assert answer == {"log_level": "error", "log_requests": True}
    assert engine.got[-1].log_level == "error"
    assert logging.getLogger("weft").level == logging.ERROR
    assert server.client.deliveries.log_requests
    assert http.post("/configure_logging", json={"log_requests": False}).json()["log_level"] is None
    assert not server.client.deliveries.log_requests
    assert (
        error(http.post("/configure_logging", json={"log_level": "loud"}))["param"] == "log_level"
    )
    assert logging.getLogger("weft").level == logging.ERROR


def test_prompts_are_never_logged_or_dumped(engine: Obedient, http: httpx.Client) -> None:
    for field, value in (
        ("dump_requests_folder", "/tmp/x"),
        ("log_requests_level", 3),
        ("crash_dump_folder", "/"),
    ):
        assert (
            error(http.post("/configure_logging", json={"log_requests": True, field: value}))[
                "param"
            ]
            == field
        )
    assert http.post(
        "/configure_logging", json={"log_requests_level": 0, "dump_requests_folder": None}
    ).is_success


def test_a_profile_is_started_with_or_without_a_body(engine: Obedient, http: httpx.Client) -> None:
    engine.num_preparing = 2
    assert http.post("/start_profile").json() == {
        "recording": True,
        "num_steps": None,
        "trace": "t.gz",
    }
    assert [isinstance(one, control.StartProfile) for one in engine.got] == [True] * 3
    how = {
        "num_steps": 5,
        "activities": ["CPU"],
        "with_stack": True,
        "output_dir": "a",
        "profile_prefix": "p",
    }
    assert http.post("/start_profile", json=how).json()["num_steps"] == 5
    got = engine.got[-1]
    assert (got.num_steps, got.activities, got.with_stack, got.output_dir, got.profile_prefix) == (
        5,
        ["CPU"],
        True,
        "a",
        "p",
    )
    assert error(http.post("/start_profile", json={"output_dir": "/etc"}))["message"] == "not below"
    assert error(http.post("/start_profile", json={"num_steps": 0}))["param"] == "num_steps"
    assert (
        error(http.post("/start_profile", json={"profile_by_stage": True}))["param"]
        == "profile_by_stage"
    )


def test_the_report_of_a_profile_is_waited_for(engine: Obedient, http: httpx.Client) -> None:
    answer = http.post("/stop_profile").json()
    assert answer == {"num_steps": 3, "trace": "t.gz", "table": "aten::mm"}
    assert len(engine.got) == 2
    engine.reports = ["none"]
    assert error(http.post("/stop_profile"))["message"] == "nothing recorded"
    engine.reports = ["failed"]
    assert http.post("/stop_profile").status_code == 500


def test_both_collectors_are_frozen(
    engine: Obedient, http: httpx.Client, own_freezing: None
) -> None:
    answer = http.post("/freeze_gc").json()
    assert answer["frozen_objects"] == 7
    assert answer["front_frozen_objects"] > 1_000
    assert gc.get_freeze_count() > 1_000


def test_the_load_is_reported_for_each_engine_and_for_all(
    engine: Obedient, http: httpx.Client
) -> None:
    answer = http.get("/v1/loads").json()
    (load,) = answer["loads"]
    assert answer["dp_rank_count"] == 1
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (3, 5, 8)
    assert (load["utilization"], load["token_usage"]) == (0.75, 0.25)
    assert answer["aggregate"] == {
        "total_running_reqs": 3,
        "total_waiting_reqs": 5,
        "total_reqs": 8,
        "total_used_tokens": 250,
        "total_tokens": 1_000,
        "avg_token_usage": 0.25,
        "avg_throughput": load["gen_throughput"],
        "avg_utilization": 0.75,
    }
    assert http.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 8, "num_waiting_reqs": 5, "num_tokens": 250}
    ]
    page = http.get("/v1/loads?format=prometheus")
    assert 'weft:load_num_waiting_reqs{dp_rank="0"} 5\n' in page.text
    assert page.headers["content-type"].startswith("text/plain")
    assert error(http.get("/v1/loads?format=xml"))["param"] == "format"
    assert error(http.get("/v1/loads?dp_rank=1"))["param"] == "dp_rank"


def test_the_load_does_not_wait_for_a_long_step(engine: Obedient, http: httpx.Client) -> None:
    (fresh,) = http.get("/v1/loads").json()["loads"]
    engine.is_mute = True
    (load,) = http.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] == fresh["num_running_reqs"] == 3
    assert load["age_s"] >= LOADS_TIMEOUT_S


def test_control_needs_the_administration_key() -> None:
    with running(ServerConfig(admin_api_key="secret", drain_s=1.0)) as server:
        for method, path in (
            ("POST", "/slow_down"),
            ("GET", "/get_internal_state"),
            ("POST", "/set_internal_state"),
            ("POST", "/configure_logging"),
            ("POST", "/start_profile"),
            ("POST", "/stop_profile"),
            ("POST", "/freeze_gc"),
        ):
            assert httpx.request(method, server.url + path, json={}).status_code == 403, path

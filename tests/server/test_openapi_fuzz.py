"""Requests made from /openapi.json, right ones and wrong ones: each is answered as the document
says, and none with a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.examples import example_of
from tests.server.fake import HANG_S, RunningServer
from weft.messages import control, weights
from weft.messages.calls import ControlRequest, reply_type
from weft.messages.codec import ToEngine

schemathesis = pytest.importorskip("schemathesis")

NUM_RIGHT = 2  # requests of each route
NUM_WRONG = 1  # to make one takes long
NO_STORE = "this server was started without a store of models"  # as `answering` is


@pytest.fixture
def answering(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server whose engine answers every call at once."""
    send = server.engine.send
    by_the_fake = {control.GetState, control.FlushCache, control.HealthCheck}

    def answer(message: ToEngine) -> None:
        if not isinstance(message, ControlRequest) or type(message) in by_the_fake:
            send(message)
            return
        kind = reply_type(type(message))
        known = {"success": True} if "success" in kind.__struct_fields__ else {}
        if kind is weights.GetWeightsByNameReply:
            known |= {"shape": [1], "values": bytes(4)}
        if "weight_version" in kind.__struct_fields__:
            known["weight_version"] = "default"  # the front takes it over
        if kind is control.ConfigureLoggingReply:
            known["success"] = False  # it would change what these tests log
        server.engine.answer(example_of(kind, call=message.call, **known))

    monkeypatch.setattr(server.engine, "send", answer)
    return server


def test_every_route_answers_as_its_document_says(answering: RunningServer) -> None:
    document = httpx.get(f"{answering.url}/openapi.json").json()
    right = schemathesis.GenerationMode.POSITIVE
    wrong = schemathesis.GenerationMode.NEGATIVE
    statuses: list[int] = []
    complaints: list[str] = []

    def ask(case: Any) -> None:
        answer = case.call(base_url=answering.url, timeout=HANG_S)
        statuses.append(answer.status_code)
        if told := complaint(answer.status_code, answer.text, document, case.operation):
            complaints.append(
                f"{case.operation.label} {case.body!r:.300} {case.path_parameters!r:.100}: {told}"
            )

    bodies: dict[str, Any] = {}  # a right one of each kind of route

    def ask_rightly(case: Any) -> None:
        bodies[kind_of(document, case.operation)] = case.body
        ask(case)

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.path == "/events":
            continue  # its answer does not end; tests/server/test_page.py reads it
        kind = kind_of(document, operation)
        if kind in bodies and not operation.path_parameters:
            # Another name of a route: making requests is what takes long.
            ask(operation.Case(body=bodies[kind], media_type="application/json"))
            continue
        try_out(ask_rightly, operation.as_strategy(generation_mode=right), NUM_RIGHT)
        if operation.body or operation.path_parameters:  # else nothing of it can be wrong
            try_out(ask, operation.as_strategy(generation_mode=wrong), NUM_WRONG)
    assert not complaints, "\n".join(complaints)
    assert len(statuses) > 200
    assert {200, 400} <= set(statuses)


def kind_of(document: dict[str, Any], operation: Any) -> str:
    """The same for routes that take and give the same."""
    described = document["paths"][operation.path][operation.method.lower()]
    parts = [described.get(name) for name in ("parameters", "requestBody", "responses")]
    return json.dumps([operation.method, *parts], sort_keys=True)


def try_out(ask: Callable[[Any], None], cases: SearchStrategy[Any], num_cases: int) -> None:
    """Ask with so many of `cases`, each time the same ones."""

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def run(case: Any) -> None:
        ask(case)

    run()


def complaint(status: int, text: str, document: dict[str, Any], operation: Any) -> str:
    """What is wrong with an answer, or nothing."""
    documented = document["paths"][operation.path][operation.method.lower()]["responses"]
    if str(status) not in documented and f"{status // 100}XX" not in documented:
        return f"{status} is not documented"
    if status >= 500 and status != 503 and (status != 501 or NO_STORE not in text):
        return f"a fault of the server: {status} {text[:300]}"
    if status >= 400 and "error" not in json.loads(text):
        return f"{status} without an error: {text[:300]}"
    return ""

"""One name for a request from its header to its answer, its lines in the log, its metrics and its
errors."""

from __future__ import annotations

import io
import re

import httpx
import pytest

from tests.server.fake import RunningServer, eventually, running
from weft.server.app import OPERATIONS

TEXT = "/v1/completions"


def test_one_name_goes_all_the_way(lines: io.StringIO) -> None:
    with running(log_requests=True) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post(TEXT, json={"prompt": "x"}, headers={"x-request-id": "trip-1"})
        assert answer.headers["x-request-id"] == "trip-1"
        assert answer.json()["id"] == "cmpl-trip-1"
        assert server.engine.seen[-1].rid == "trip-1"
        page = http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "per_stage_req_latency_seconds",
    ):
        assert re.search(rf'weft:{name}_bucket{{.*# {{rid="trip-1"}}', page.text), name
    [line] = [line for line in lines.getvalue().splitlines() if " finished " in line]
    assert " finished rid=trip-1 reason=length prompt_tokens=1 " in line
    for stage in (
        "tokenize_s=",
        "dispatch_s=",
        "queue_s=0.001",
        "prefill_s=",
        "decode_s=",
        "total_s=",
    ):
        assert stage in line


def test_name_in_the_body_is_reported_in_the_header_too(
    http: httpx.Client, server: RunningServer
) -> None:
    answer = http.post(
        TEXT, json={"prompt": "x", "rid": "own-1"}, headers={"x-request-id": "other"}
    )
    assert answer.headers["x-request-id"] == "own-1"
    assert answer.json()["id"] == "cmpl-own-1"
    answer = http.post(
        TEXT, json={"prompt": "x", "rid": "größe 1"}, headers={"x-request-id": "other"}
    )
    assert answer.headers["x-request-id"] == "other"  # no header can carry that
    assert server.engine.seen[-1].rid == "größe 1"


def test_names_of_several_prompts_leave_the_request_its_own(
    http: httpx.Client, server: RunningServer
) -> None:
    body = {"text": ["x", "y"], "rid": ["one", "two"]}
    answer = http.post("/generate", json=body, headers={"x-request-id": "both"})
    assert answer.headers["x-request-id"] == "both"
    assert [one["meta_info"]["id"] for one in answer.json()] == ["one", "two"]
    refused = http.post("/generate", json={**body, "rid": ["one", "a\nb"]})
    assert refused.json()["error"]["message"] == "rid must be printable characters"


def test_error_names_the_request(http: httpx.Client) -> None:
    for path, body in ((TEXT, {"prompt": ""}), ("/nowhere", {}), ("/generate", {})):
        answer = http.post(path, json=body, headers={"x-request-id": "wrong-1"})
        assert answer.status_code >= 400
        assert answer.json()["request_id"] == answer.headers["x-request-id"] == "wrong-1"


@pytest.mark.parametrize(
    "hostile",
    [
        b"a b",
        b"x" * 129,
        b"a\x1b[31m",
        "ä".encode("latin-1"),
        b"",
        b"a\tb",
        b'"\x7f"',
        b"\xff" * 20,
    ],
)
def test_hostile_name_is_replaced(http: httpx.Client, hostile: bytes) -> None:
    answer = http.get("/version", headers={"x-request-id": hostile})
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_hostile_values_stay_in_their_line(lines: io.StringIO) -> None:
    bad = "a\r\nforged \x1b[31m"
    with running(log_requests=True) as server, httpx.Client(base_url=server.url) as http:
        for body in ({"rid": bad}, {"model": bad}, {"user": bad * 100_000}, {bad: 1}):
            http.post(TEXT, json={"prompt": "x", **body})
        http.post("/abort_request", json={"rid": bad})
        assert eventually(lambda: server.client.num_open == 0)
    text = lines.getvalue()
    assert "\x1b" not in text
    assert not any(line.startswith("forged") for line in text.splitlines())
    assert max(map(len, text.splitlines())) < 1_000


def test_finished_line_is_at_debug_unless_asked_for(lines: io.StringIO) -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        http.post(TEXT, json={"prompt": "x"})
        assert " finished " not in lines.getvalue()
        http.post(TEXT, json={"prompt": "x"}, headers={"x-request-timeout-ms": "0"})
        server.engine.full = True
        http.post(TEXT, json={"prompt": "x"})
    assert len([line for line in lines.getvalue().splitlines() if " finished " in line]) == 1


def test_no_route_forgets_the_name() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        server.call(lambda: server.client.engine_lost("test"))  # every call is answered at once
        for operation in OPERATIONS:
            path = re.sub(r"{\w+(:path)?}", "x", operation.path)
            named = {"x-request-id": "each-1"}
            with http.stream(operation.method, path, headers=named) as answer:  # some never end
                assert answer.headers["x-request-id"] == "each-1", path

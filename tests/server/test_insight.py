"""Routes that tell what the engine does, and requests with a deadline, over HTTP to a fake
engine."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from tests.server.fake import READY, RunningServer, eventually, running
from weft.cli.why import causes
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages import control
from weft.messages.codec import ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.observe.request_context import RequestContext
from weft.server.http.middleware import CLIENT_LEFT
from weft.server.refusals import MAX_REFUSALS, RefusalLog

ROW = control.RequestRow(
    id=3,
    rid="a/b",
    state="waiting",
    position=14,
    age_s=0.5,
    prompt_tokens=10,
    output_tokens=0,
    cached_tokens=0,
)
QUEUE = control.QueueStatus(
    waiting_queue_size=15,
    running_batch_size=2,
    prefilling=0,
    max_queued_requests=4_096,
    max_running_requests=2,
    batch_is_full=True,
    chunked_rid=None,
    free_tokens=2_900,
)
ENTRY = control.TimelineEntry(
    at_s=0.2,
    first_step=812,
    last_step=930,
    times=118,
    what="waits: no KV memory: r17 needs 3,100 tokens",
)
EXPLANATION = control.Explanation(
    id=3,
    rid="a/b",
    state="waiting",
    position=14,
    prompt_tokens=10,
    output_tokens=0,
    cached_tokens=0,
    stages=control.StageTimes(queued_s=0.5, prefill_s=None, decode_s=None, total_s=0.5),
    retractions=0,
    recomputed_tokens=0,
    refound_tokens=0,
    timeline=[ENTRY],
)


@pytest.fixture
def telling(server: RunningServer) -> RunningServer:
    """A server whose engine answers questions about itself."""
    return tell(server)


def tell(server: RunningServer) -> RunningServer:
    engine = server.engine
    send = engine.send

    def answer(message: ToEngine) -> None:
        match message:
            case control.ListRequests():
                rows = [ROW] * min(message.limit, 15)
                engine.answer(
                    control.ListRequestsReply(call=message.call, queue=QUEUE, requests=rows)
                )
            case control.ExplainRequest():
                found = [EXPLANATION] if message.rid == ROW.rid else []
                engine.answer(control.ExplainRequestReply(call=message.call, found=found))
            case control.AuditKv():
                engine.answer(
                    control.AuditReply(
                        call=message.call,
                        faults=["page 7 is owned by nobody"],
                        num_pages=10,
                        free=5,
                        cached=2,
                        held=2,
                        rows=1,
                        quarantined=1,
                        total_faults=1,
                    )
                )
            case _:
                send(message)

    engine.send = answer  # type: ignore[method-assign]
    return server


def test_open_requests_are_listed_with_the_queue(
    telling: RunningServer, http: httpx.Client
) -> None:
    answer = http.get("/requests").json()
    assert answer["queue"]["waiting_queue_size"] == 15
    assert answer["queue"]["free_tokens"] == 2_900
    assert answer["requests"][0] == {
        "id": 3,
        "rid": "a/b",
        "state": "waiting",
        "position": 14,
        "age_s": 0.5,
        "prompt_tokens": 10,
        "output_tokens": 0,
        "cached_tokens": 0,
        "session": "",
        "priority": 0,
        "service": "online",
        "tenant": "",
        "user": "",
        "timeout_s": None,
        "retractions": 0,
        "why": "",
        "shadow": "",
        "dp_rank": 0,
    }
    assert len(http.get("/requests?limit=2").json()["requests"]) == 2
    assert http.get("/requests?limit=0").status_code == 400
    assert http.get("/requests?limit=x").status_code == 400


def test_a_request_is_explained_by_its_exact_name(
    telling: RunningServer, http: httpx.Client
) -> None:
    (one,) = http.get("/requests/a/b").json()["requests"]
    assert one["position"] == 14
    assert one["stages"]["queued_s"] == 0.5
    assert one["timeline"][0]["times"] == 118
    assert one["text"] == [
        "    0.200 s  step 812-930, 118 times: waits: no KV memory: r17 needs 3,100 tokens",
    ]
    missing = http.get("/requests/a")
    assert missing.status_code == 404
    assert "'a'" in missing.json()["error"]["message"]


def test_the_books_are_audited_on_demand(telling: RunningServer, http: httpx.Client) -> None:
    answer = http.post("/audit").json()
    assert answer["faults"] == ["page 7 is owned by nobody"]
    assert (answer["free"], answer["cached"], answer["held"], answer["quarantined"]) == (5, 2, 2, 1)
    assert "call" not in answer


def test_insight_needs_the_administration_key() -> None:
    with running(ServerConfig(admin_api_key="secret", drain_s=1.0)) as server:
        for method, path in (("GET", "/requests"), ("GET", "/requests/x"), ("POST", "/audit")):
            assert httpx.request(method, server.url + path).status_code == 403


# Deadlines


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_timeout_goes_to_the_engine_from_the_body_or_the_header(
    server: RunningServer, http: httpx.Client, path: str
) -> None:
    assert http.post(path, json=BODIES[path] | {"timeout_ms": 1_500}).status_code == 200
    assert (
        http.post(path, json=BODIES[path], headers={"X-Request-Timeout-Ms": "2500"}).status_code
        == 200
    )
    assert http.post(path, json=BODIES[path]).status_code == 200
    assert [request.timeout_ms for request in server.engine.seen] == [1_500, 2_500, 0]
    for bad in ({"timeout_ms": 0}, {"timeout_ms": -1}, {"timeout_ms": 10**12}):
        assert http.post(path, json=BODIES[path] | bad).json()["error"]["param"] == "timeout_ms"
    assert (
        http.post(path, json=BODIES[path], headers={"X-Request-Timeout-Ms": "soon"}).status_code
        == 400
    )


@pytest.mark.parametrize(("status", "retry"), [(503, "1"), (408, None)])
def test_a_request_whose_time_is_over_has_that_status(
    server: RunningServer, http: httpx.Client, status: int, retry: str | None
) -> None:
    def end(message: ToEngine) -> None:
        assert isinstance(message, GenerateRequest)
        finish = Finish(
            id=message.id, reason="abort", status=status, message="the request waited for 2 s"
        )
        server.engine.answer(StepOutput(finished=[finish]))

    server.engine.send = end  # type: ignore[method-assign]
    for stream in (False, True):
        answer = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "the request waited for 2 s"
        assert answer.headers.get("retry-after") == retry


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": -7}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": "x"}, 400, "messages"),
        ("/v1/completions", {"prompt": "x", "model": "nobody"}, 404, "nobody"),
        ("/v1/messages", {"messages": []}, 400, "max_tokens"),
    ],
)
def test_asking_for_a_refused_request_gives_the_reason(
    telling: RunningServer,
    http: httpx.Client,
    path: str,
    body: dict[str, Any],
    status: int,
    part: str,
) -> None:
    name = f"refused-{path.rpartition('/')[2]}-{status}"
    answer = http.post(path, json=body, headers={"x-request-id": name})
    assert answer.status_code == status
    one = refusal(http, name)
    assert (one["rid"], one["path"], one["status"]) == (name, path, status)
    assert part in one["message"]
    # A question that finds nothing is no request that was refused.
    nothing = http.get("/requests/nobody")
    assert nothing.status_code == 404
    again = http.get(f"/requests/{nothing.json()['request_id']}").json()
    assert "no request named" in again["error"]["message"]


def refusal(http: httpx.Client, name: str) -> Any:
    """The latest refusal of this name; its time is all accounted for."""
    told = http.get(f"/requests/{name}").json()
    assert told["requests"] == []
    one = told["refused"][0]
    assert sum(part["seconds"] for part in one["times"]) == pytest.approx(one["total_s"])
    line = next(iter(causes(told)))
    how = f"answered with {one['status']}"
    if one["status"] == CLIENT_LEFT:
        how = "was not answered"
    assert line.startswith(f"{name}: {one['path']} {how}, ")
    assert line.endswith(f" s ago: {one['message']}")
    return one


def test_whatever_the_front_refuses_has_a_history() -> None:
    config = ServerConfig(drain_s=1.0, api_key="user", admin_api_key="admin")
    limits = Limits(max_body_mb=0.001)
    with running(config, limits=limits) as server, httpx.Client(base_url=server.url) as http:
        tell(server)
        http.headers["authorization"] = "Bearer admin"

        def post(name: str, **sent: Any) -> Any:
            headers = {"x-request-id": name, **sent.pop("headers", {})}
            answer = http.post("/v1/completions", **sent, headers=headers)
            one = refusal(http, name)
            assert one["status"] == answer.status_code
            return one

        key = {"authorization": "Bearer wrong"}
        assert post("no-key", json={"prompt": "x"}, headers=key)["status"] == 401
        assert post("too-large", json={"prompt": "x" * 2_000})["status"] == 413
        text = {"content-type": "text/html"}
        assert post("not-json", content="x", headers=text)["status"] == 415
        assert post("no-object", content="[")["status"] == 400
        server.client.state.ready = None
        one = post("loading", json={"prompt": "x"})
        assert (one["status"], one["message"]) == (503, "the engine is not ready yet")
        server.call(lambda: server.client.deliver(READY))
        with socket.create_connection(("127.0.0.1", server.port)) as cut:
            cut.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n"
                b"authorization: Bearer user\r\nx-request-id: cut\r\n\r\n{"
            )
            assert eventually(lambda: any(one._head_len < 0 for one in server.connections))
        assert eventually(lambda: http.get("/requests/cut").status_code == 200)
        one = refusal(http, "cut")
        assert one["status"] == CLIENT_LEFT
        assert one["message"] == "the client left when 1 bytes of the body had arrived"


def test_a_body_that_comes_too_late_has_a_history() -> None:
    limits = Limits(body_timeout_s=0.05)
    with running(limits=limits) as server, httpx.Client(base_url=server.url) as http:
        tell(server)
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n"
                b"x-request-id: slow\r\n\r\n{"
            )
            assert b" 408 " in slow.recv(64)
            assert eventually(lambda: http.get("/requests/slow").status_code == 200)
        assert refusal(http, "slow")["status"] == 408


def test_a_refusal_that_the_engine_remembers_is_not_told_twice() -> None:
    refusals = RefusalLog()
    request = RequestContext(ROW.rid, 0.0, is_in_engine=True)
    refusals.note(request, "/x", 429, "the queue is full")
    assert [one.status for one in refusals.of(ROW.rid, is_in_engine=False)] == [429]
    assert refusals.of(ROW.rid, is_in_engine=True) == []


def test_requests_without_a_key_displace_no_refusal_of_others() -> None:
    refusals = RefusalLog()
    refusals.note(RequestContext("mine", 0.0), "/x", 400, "bad")
    for number in range(2 * MAX_REFUSALS):
        refusals.note(RequestContext(f"r{number}", 0.0), "/x", 401, "no key")
    assert len(refusals.of("mine", is_in_engine=False)) == 1
    assert refusals.of("r0", is_in_engine=False) == []


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/v1/completions", {"prompt": 7}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -7}, "max_tokens"),
        ("/v1/completions", {"prompt": "x" * 40_000, "max_tokens": []}, "max_tokens"),
        ("/generate", {"text": "x", "sampling_params": 7}, "sampling_params"),
        ("/v1/completions", {"prompt": "x", "model": "nobody"}, "nobody"),
    ],
)
def test_a_request_whose_body_was_refused_is_found_by_the_name_in_it(
    telling: RunningServer, http: httpx.Client, path: str, body: dict[str, Any], part: str
) -> None:
    refused = http.post(path, json={**body, "rid": "mine"})
    assert refused.headers["x-request-id"] == refused.json()["request_id"] == "mine"
    one = refusal(http, "mine")
    assert (one["path"], one["status"]) == (path, refused.status_code)
    assert part in one["message"]
    # A name that cannot be a name is not used.
    for name in ("n" * 10_000, 7, ["mine"], "two words", ""):
        other = http.post(path, json={**body, "rid": name})
        assert other.headers["x-request-id"] not in (name, "mine")


def test_only_the_latest_refusals_are_remembered() -> None:
    now = [100.0]
    refusals = RefusalLog(clock=lambda: now[0])
    for number in range(MAX_REFUSALS + 3):
        request = RequestContext(f"r{number % MAX_REFUSALS}", 99.0)
        refusals.note(request, "/x", 400, f"reason {number}")
    now[0] += 7.25
    (one,) = refusals.of("r2", is_in_engine=False)
    assert (one.message, one.total_s) == (f"reason {MAX_REFUSALS + 2}", 1.0)
    assert refusals.ago_s(one) == 7.25
    assert refusals.of("r", is_in_engine=False) == []

"""Sessions over HTTP, with a scheduler behind the server whose model is an oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.fake import RunningServer
from tests.server.oracle_engine import OracleEngine


@pytest.fixture
def engine(server: RunningServer) -> Iterator[OracleEngine]:
    """The engine of `server`, which is a real one for the length of a test."""
    before, server.engine = server.engine, OracleEngine(server)  # type: ignore[assignment]
    yield server.engine  # type: ignore[misc]
    server.engine = before


def generate(
    http: httpx.Client, ids: list[int], session: dict[str, Any], **fields: Any
) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    return http.post(
        "/generate",
        json={"input_ids": ids, "session_params": session, "sampling_params": sampling, **fields},
    )


def test_a_conversation_as_sglangs_clients_hold_it(
    engine: OracleEngine, http: httpx.Client
) -> None:
    id = http.post("/open_session", json={"capacity_of_str_len": 1_000}).json()
    again = http.post("/open_session", json={"capacity_of_str_len": 1_000, "session_id": id})
    assert again.status_code == 400
    assert again.json()["error"]["message"] == f"the session '{id}' is open already"

    first = generate(
        http, list(range(20, 30)), {"id": id, "rid": None, "offset": -1, "replace": True}
    ).json()
    params = {"id": id, "rid": first["meta_info"]["id"], "offset": -1, "replace": True}
    second = generate(http, [40, 41], params).json()
    history = [*range(20, 30), *first["output_ids"]][:-1]
    plain = http.post(
        "/generate",
        json={
            "input_ids": [*history, 40, 41],
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        },
    ).json()
    assert second["output_ids"] == plain["output_ids"]
    assert second["meta_info"]["prompt_tokens"] == 17
    assert second["meta_info"]["cached_tokens"] == 12

    branch = generate(http, [50], {"id": id, "rid": first["meta_info"]["id"], "replace": True})
    assert branch.status_code == 200
    gone = generate(http, [50], {"id": id, "rid": second["meta_info"]["id"]})
    assert gone.status_code == 400
    assert "has no turn" in gone.json()["error"]["message"]

    closed = http.post("/close_session", json={"session_id": id})
    assert closed.status_code == 200
    assert closed.json() == {"success": True, "message": ""}
    assert generate(http, [50], {"id": id}).status_code == 404
    unknown = http.post("/close_session", json={"session_id": id})
    assert unknown.status_code == 200
    assert not unknown.json()["success"]
    assert "there is no session" in unknown.json()["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_both_openai_routes_take_the_field_and_count_the_history(
    engine: OracleEngine, http: httpx.Client, stream: bool
) -> None:
    http.post("/open_session", json={"session_id": "talk"})
    sampled = {
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "session_params": {"id": "talk"},
    }
    http.post("/v1/completions", json={"prompt": [60, 61, 62, 63], **sampled}).raise_for_status()
    body = {
        "messages": [{"role": "user", "content": "go on"}],
        "input_ids": [70, 71],
        **sampled,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    usage = events[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["prompt_tokens"] == 10
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == 14
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_without_a_length_the_engine_decides_how_much_the_session_leaves(
    engine: OracleEngine, http: httpx.Client
) -> None:
    http.post("/open_session", json={"session_id": "short", "capacity": 30})
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "input_ids": [70, 71],
        "ignore_eos": True,
    }
    answer = http.post(
        "/v1/chat/completions", json={**body, "session_params": {"id": "short"}}
    ).json()
    assert answer["usage"]["completion_tokens"] == 28
    assert engine.seen[-1].sampling.max_new_tokens is None


def test_a_stop_string_ends_the_history_where_the_client_saw_it_end(
    engine: OracleEngine, http: httpx.Client
) -> None:
    http.post("/open_session", json={"session_id": "stopped"})
    whole = generate(http, [80, 81], {"id": "stopped"}, rid="whole").json()
    stop = whole["text"][2:4]
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "stop": [stop]}
    session = {"id": "stopped", "replace": True}
    cut = generate(http, [80, 81], session, rid="cut", sampling_params=sampling).json()
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    on = generate(http, [90], {"id": "stopped", "rid": "cut"}).json()
    assert on["meta_info"]["prompt_tokens"] == 2 + len(cut["output_ids"]) + 1


def test_a_session_that_is_in_use_closes_later_and_takes_nothing_more(
    server: RunningServer, engine: OracleEngine, http: httpx.Client
) -> None:
    http.post("/open_session", json={"session_id": "busy"})
    engine.is_held = True
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    body = {
        "input_ids": [30],
        "session_params": {"id": "busy"},
        "sampling_params": sampling,
        "stream": True,
    }
    with http.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy = generate(http, [31], {"id": "busy"})
        assert busy.status_code == 409
        assert "is still running" in busy.json()["error"]["message"]
        closed = http.post("/close_session", json={"session_id": "busy"}).json()
        assert closed == {
            "success": True,
            "message": "it is closed when its running requests have ended",
        }
        late = generate(http, [31], {"id": "busy"})
        assert late.json()["error"]["message"] == "the session 'busy' is being closed"
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["meta_info"]["completion_tokens"] == 20
    assert server.call(lambda: len(engine.engine.services.sessions.feature)) == 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "/open_session",
            {"session_id": "x" * 129},
            "session_id has 129 characters; at most 128 are allowed",
        ),
        (
            "/open_session",
            {"session_id": "a\nb"},
            "session_id must be 1 to 128 printable characters",
        ),
        ("/open_session", {"session_id": ""}, "session_id must be 1 to 128 printable characters"),
        ("/open_session", {"capacity": 0}, "capacity is 0; 1 or more are allowed"),
        (
            "/open_session",
            {"capacity": 1_001},
            "the capacity is 1,001 tokens; 1 to 1,000 are allowed",
        ),
        (
            "/open_session",
            {"capacity": 5, "capacity_of_str_len": 6},
            "are the same; give one of them",
        ),
        (
            "/open_session",
            {"timeout": -1},
            "timeout is -1.0; a number above 0, at most 1,000,000,000, is allowed",
        ),
        ("/open_session", {"timeout": 601}, "the timeout is 601 s; at most 600 s are allowed"),
        ("/close_session", {}, "session_id"),
        ("/generate", {"text": "a", "session_params": {}}, "id"),
        (
            "/generate",
            {"text": "a", "session_params": {"id": "s", "rid": "x" * 129}},
            "rid has 129 characters",
        ),
        (
            "/generate",
            {"text": "a", "session_params": {"id": "s", "offset": 2**40}},
            "session_params.offset is 1099511627776",
        ),
        (
            "/generate",
            {"text": "a", "session_params": [{"id": "s"}] * 2},
            "session_params has the length 2; 1 is expected, an entry for each prompt",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "n": 2, "session_params": {"id": "s"}},
            "has one completion",
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "session_params": {"id": "s"}},
            "has one completion",
        ),
    ],
)
def test_invalid_fields_of_sessions_are_named(
    engine: OracleEngine, http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not engine.seen


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"capacity": 1_001}, "capacity"),
        ({"capacity_of_str_len": 1_001}, "capacity_of_str_len"),
        ({"timeout": 601}, "timeout"),
        ({"session_id": "open"}, "session_id"),
    ],
)
def test_a_session_that_is_refused_by_the_engine_names_the_wrong_field(
    engine: OracleEngine, http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    http.post("/open_session", json={"session_id": "open"})
    answer = http.post("/open_session", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_no_more_sessions_are_opened_than_the_setting_allows(
    engine: OracleEngine, http: httpx.Client
) -> None:
    ids = {http.post("/open_session", json={}).json() for _ in range(3)}
    assert len(ids) == 3
    full = http.post("/open_session", json={})
    assert full.status_code == 400
    assert full.json()["error"]["param"] is None
    assert (
        full.json()["error"]["message"] == "3 sessions are open, as many as --max-sessions allows"
    )


def test_requests_and_metrics_tell_of_sessions(engine: OracleEngine, http: httpx.Client) -> None:
    http.post("/open_session", json={"session_id": "seen"})
    generate(http, list(range(10)), {"id": "seen"})
    assert "weft:num_sessions{" in http.get("/metrics").text
    lines = http.get("/metrics").text.splitlines()
    values = {
        line.partition("{")[0]: line.split()[-1] for line in lines if line.startswith("weft:")
    }
    assert values["weft:num_sessions"] == "1.0"
    assert values["weft:kv_held_tokens"] == "12.0"
    assert http.get("/requests").json()["queue"]["sessions"] == 1
    told = msgspec.to_builtins(engine.engine.services.stats())
    assert told["num_sessions"] == 1

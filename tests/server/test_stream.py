"""The exact shape of streams, and what happens when one side goes away."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.server.fake import MODEL, RunningServer, as_bytes, eventually, running
from weft.config.server import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def events(body: str) -> list[str]:
    """The data of each event."""
    assert body.endswith("\n\n")
    parts = body.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_chat_stream_is_role_content_finish_usage_done(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes('a"%s')
    server.engine.step_s = 0.01
    body = {**CHAT, "stream": True, "rid": "100%d", "stream_options": {"include_usage": True}}
    chunks = ask(http, "/v1/chat/completions", body)
    created = chunks[0]["created"]
    common = {"id": "chatcmpl-100%d", "object": "chat.completion.chunk", "created": created, "model": MODEL}
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks[0] == {**common, "choices": [{**plain, "delta": {"role": "assistant", "content": ""}}]}
    assert [chunk["choices"] for chunk in chunks[1:-2]] == [[{**plain, "delta": {"content": c}}] for c in 'a"%s']
    assert all({**chunk, "choices": []} == {**common, "choices": []} for chunk in chunks[:-1])
    finish = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert chunks[-2]["choices"] == [{**finish, "matched_stop": 257, "stop_reason": 257}]
    num_prompt = len(server.engine.seen[0].input_ids) // 4
    assert chunks[-1] == {
        **common,
        "choices": [],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 5,
            "total_tokens": num_prompt + 5,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        },
    }


def test_completion_stream_is_text_finish_done(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes("ab")
    server.engine.step_s = 0.01
    chunks = ask(http, "/v1/completions", {"prompt": "x", "stream": True, "rid": "100%d"})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {"cmpl-100%d"}
    assert "usage" not in chunks[-1]


def test_usage_can_stand_in_every_chunk(http: httpx.Client, server: RunningServer) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
        chunks = ask(http, path, {**body, **options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] > 0


def test_no_chunk_holds_half_a_character(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: [*as_bytes("ö🎉中"), 0xF0, 0x9F]
    server.engine.step_s = 0.002
    chunks = ask(http, "/v1/chat/completions", {**CHAT, "stream": True})
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert [text for text in texts if text] == ["ö", "🎉", "中", "\ufffd"]


def test_generate_streams_the_whole_text_again_and_again(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: as_bytes("ab")
    server.engine.step_s = 0.01
    chunks = ask(http, "/generate", {"text": "x", "stream": True, "rid": "my-id"})
    assert [chunk["text"] for chunk in chunks] == ["a", "ab", "ab"]
    assert [chunk["output_ids"] for chunk in chunks] == [[97], [97, 98], [97, 98, 257]]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert {chunk["meta_info"]["id"] for chunk in chunks} == {"my-id"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_case_10_disconnect_aborts_within_a_second(server: RunningServer, path: str, stream: bool, hold: bool) -> None:
    server.engine.script = lambda ids: [97] * 1_000
    server.engine.hold = hold  # queued, or generating
    server.engine.step_s = 0.01
    body = {**CHAT, "prompt": "x", "text": "x", "stream": stream, "max_tokens": 900}
    body["sampling_params"] = {"max_new_tokens": 900}
    with (
        httpx.Client(base_url=server.url) as http,
        http.stream("POST", path, json=body) if (stream and not hold) else _impatient(http, path, body) as answer,
    ):
        if answer is not None:
            next(answer.iter_bytes())
    gone = time.perf_counter()
    assert eventually(lambda: bool(server.engine.aborted) and not server.engine.running)
    [(when, id)] = server.engine.aborted
    assert when - gone < 1.0
    assert id == server.engine.seen[0].id
    assert server.client.num_open == 0


class _impatient:
    """A request whose client gives up after a moment without an answer."""

    def __init__(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self._call = lambda: http.post(path, json=body, timeout=0.1)

    def __enter__(self) -> None:
        with pytest.raises(httpx.ReadTimeout):
            self._call()

    def __exit__(self, *exc: object) -> None:
        pass


def test_case_10_disconnect_of_a_batch_aborts_all_of_it(server: RunningServer) -> None:
    server.engine.hold = True
    body = {"prompt": ["a", "b"], "n": 2}
    with httpx.Client(base_url=server.url) as http, _impatient(http, "/v1/completions", body):
        pass
    assert eventually(lambda: len(server.engine.aborted) == 4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_error_inside_a_stream_is_an_event_and_then_done(server: RunningServer, path: str) -> None:
    server.engine.script = lambda ids: [97] * 1_000
    server.engine.step_s = 0.01
    body = {**CHAT, "prompt": "x", "text": "x", "stream": True, "max_tokens": 900}
    with httpx.Client(base_url=server.url) as http, http.stream("POST", path, json=body) as answer:
        parts = answer.iter_text()
        text = next(parts)
        server.call(lambda: server.client.end_all("the engine has stopped: test"))
        text += "".join(parts)
    *_, error, done = events(text)
    assert done == "[DONE]"
    assert json.loads(error) == {
        "error": {
            "message": "the engine has stopped: test",
            "type": "service_unavailable_error",
            "param": None,
            "code": 503,
        },
        "request_id": answer.headers["x-request-id"],
    }
    assert eventually(lambda: not server.engine.running)


def test_aborted_stream_ends_with_the_reason_abort(server: RunningServer) -> None:
    server.engine.script = lambda ids: [97] * 1_000
    server.engine.step_s = 0.01
    body = {**CHAT, "stream": True, "rid": "to-abort"}
    with httpx.Client(base_url=server.url) as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        parts = answer.iter_text()
        text = next(parts)
        assert httpx.post(f"{server.url}/abort_request", json={"rid": "to-abort"}).json() == {"aborted": 1}
        text += "".join(parts)
    assert json.loads(events(text)[-2])["choices"][0]["finish_reason"] == "abort"


def test_stalled_reader_is_given_up() -> None:
    with running(ServerConfig(drain_s=1.0), max_pending_tokens=50) as server:
        server.engine.script = lambda ids: [97] * 1_900
        body = {"prompt": ["x"] * 200, "stream": True, "max_tokens": 1_900, "logprobs": 20}
        with httpx.Client(base_url=server.url) as http, http.stream("POST", "/v1/completions", json=body):
            assert eventually(lambda: len(server.engine.aborted) > 0, within_s=8.0)
        assert eventually(lambda: server.client.num_open == 0 and not server.engine.running)

"""The exact shape of streams, and what happens when one side goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.client.completions import make_completion
from tests.server.fake import HANG_S, MODEL, RunningServer, as_bytes, eventually, running
from weft.client.generation import Delta
from weft.config.server import ServerConfig
from weft.messages.sampling import SamplingParams
from weft.server.stream import Answer

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


def test_chat_stream_is_role_content_finish_usage_done(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes('a"%s')
    server.engine.step_s = 0.01
    body = {**CHAT, "stream": True, "rid": "100%d", "stream_options": {"include_usage": True}}
    chunks = ask(http, "/v1/chat/completions", body)
    created = chunks[0]["created"]
    common = {
        "id": "chatcmpl-100%d",
        "object": "chat.completion.chunk",
        "created": created,
        "model": MODEL,
    }
    plain = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks[0] == {
        **common,
        "usage": None,
        "choices": [{**plain, "delta": {"role": "assistant", "content": None}}],
    }
    assert [chunk["choices"] for chunk in chunks[1:-2]] == [
        [{**plain, "delta": {"content": c}}] for c in 'a"%s'
    ]
    without_choices = {**common, "usage": None, "choices": []}
    assert all({**chunk, "choices": []} == without_choices for chunk in chunks[:-1])
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


def test_usage_is_null_in_all_chunks_before_the_one_that_has_it(
    http: httpx.Client, server: RunningServer
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
        for more in ({}, {"logprobs": 1 if "prompt" in body else True}):
            *chunks, last = ask(http, path, {**body, **options, **more})
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
            assert last["usage"]["completion_tokens"] > 0
        chunks = ask(http, path, {**body, "stream": True})
        assert not any("usage" in chunk for chunk in chunks)


def test_usage_can_stand_in_every_chunk(http: httpx.Client, server: RunningServer) -> None:
    options = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
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


def test_generate_streams_the_whole_text_again_and_again(
    http: httpx.Client, server: RunningServer
) -> None:
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
def test_disconnect_aborts(server: RunningServer, path: str, stream: bool, hold: bool) -> None:
    server.engine.script = lambda ids: [97] * 1_000
    server.engine.hold = hold  # queued, or generating
    server.engine.step_s = 0.1  # by itself it would end long after the test
    body = {**CHAT, "prompt": "x", "text": "x", "stream": stream, "max_tokens": 900}
    body["sampling_params"] = {"max_new_tokens": 900}
    if stream and not hold:
        with httpx.stream("POST", server.url + path, json=body, timeout=HANG_S) as answer:
            next(answer.iter_bytes())
    else:
        server.leave(path, body)
    assert eventually(lambda: server.engine.aborted)
    assert server.engine.aborted == [server.engine.seen[0].id]
    assert eventually(lambda: server.client.num_open == 0)
    assert not server.engine.running


def test_disconnect_of_a_batch_aborts_all_of_it(server: RunningServer) -> None:
    server.engine.hold = True
    body = {"prompt": ["a", "b"], "n": 2}
    server.leave("/v1/completions", body)
    assert eventually(lambda: len(server.engine.aborted) == 4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_error_inside_a_stream_is_an_event_and_then_done(server: RunningServer, path: str) -> None:
    server.engine.script = lambda ids: [97] * 1_000
    server.engine.step_s = 0.1
    body = {**CHAT, "prompt": "x", "text": "x", "stream": True, "max_tokens": 900}
    with httpx.Client(base_url=server.url) as http, http.stream("POST", path, json=body) as answer:
        parts = answer.iter_text()
        text = next(parts)
        server.call(lambda: server.client.deliveries.end_all("the engine has stopped: test"))
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
    server.engine.step_s = 0.1
    body = {**CHAT, "stream": True, "rid": "to-abort"}
    with (
        httpx.Client(base_url=server.url) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        parts = answer.iter_text()
        text = next(parts)
        assert httpx.post(f"{server.url}/abort_request", json={"rid": "to-abort"}).json() == {
            "aborted": 1
        }
        text += "".join(parts)
    assert json.loads(events(text)[-2])["choices"][0]["finish_reason"] == "abort"


def test_stalled_reader_is_given_up() -> None:
    with running(ServerConfig(drain_s=1.0), max_pending_tokens=50) as server:
        server.engine.script = lambda ids: [97] * 1_900
        body = {"prompt": ["x"] * 200, "stream": True, "max_tokens": 1_900, "logprobs": 20}
        with (
            httpx.Client(base_url=server.url) as http,
            http.stream("POST", "/v1/completions", json=body),
        ):
            assert eventually(lambda: len(server.engine.aborted) > 0)
        assert eventually(lambda: server.client.num_open == 0 and not server.engine.running)


@pytest.mark.parametrize(
    "asked", [{"stream_interval": 4}, {}], ids=["by the request", "by the settings"]
)
def test_an_event_holds_as_many_tokens_as_asked_for(asked: dict[str, int]) -> None:
    with running(ServerConfig(drain_s=1.0, stream_interval=1 if asked else 4)) as server:
        server.engine.script = lambda ids: [97] * 11
        server.engine.step_s = 0.005
        native = {
            "text": "x",
            "sampling_params": {"max_new_tokens": 11, "ignore_eos": True, **asked},
        }
        with httpx.Client(base_url=server.url) as http:
            ours = ask(
                http,
                "/v1/completions",
                {"prompt": "x", "max_tokens": 11, "ignore_eos": True, "stream": True, **asked},
            )
            lens = [len(chunk["choices"][0]["text"]) for chunk in ours]
            texts = [chunk["text"] for chunk in ask(http, "/generate", {**native, "stream": True})]
            sums = [len(text) for text in texts]
    for parts in (lens, [sums[0], *(after - before for before, after in pairwise(sums))]):
        assert sum(parts) == 11
        assert all(num >= 4 for num in parts[1:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_an_interval_out_of_range_is_refused(http: httpx.Client, path: str) -> None:
    asked = {"stream_interval": 0}
    answer = http.post(
        path, json={**CHAT, "prompt": "x", "text": "x", **asked, "sampling_params": asked}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(
        "stream_interval is 0; 1 to 1,024 are allowed"
    )


def test_a_reply_that_breaks_behind_the_first_events_ends_its_stream_with_an_error() -> None:
    """Pieces are pushed from where the tokens come: what goes wrong there must stay with its own
    stream."""
    one = make_completion(SamplingParams())
    generation = one.generation
    sent: list[bytes] = []

    class Breaks:
        takes_pieces = True

        def write_piece(self, body: bytes) -> None:
            if body == b"c":
                raise RuntimeError(body)
            sent.append(body)

        def full_body(self, deltas: Sequence[Delta]) -> bytes:
            raise AssertionError

        def events(self, delta: Delta) -> bytes:
            return delta.text.encode()

        closing = bytes

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b"head"))

    async def go() -> None:
        breaks = Breaks()
        answer = Answer(generation, breaks)
        answering = asyncio.create_task(answer({"weft.connection": breaks}, receive, send))
        for token in b"abc":
            one.push(token)
            generation.wake()
            await asyncio.sleep(0.001)
        await answering

    asyncio.run(go())
    *pieces, last = sent
    assert pieces == [b"head", b"a", b"b"]
    assert b"internal server error" in last
    assert last.endswith(b"data: [DONE]\n\n")
    assert generation.closed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_options_of_streams_are_only_for_streams(http: httpx.Client, path: str) -> None:
    body = {**CHAT, "prompt": "x", "stream_options": {"include_usage": True}}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert http.post(path, json={**body, "stream_options": {}}).status_code == 200
    assert http.post(path, json={**body, "stream_options": None}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_each_chunk_needs_usage(http: httpx.Client, path: str) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {**CHAT, "prompt": "x", "stream": True, "stream_options": options}
    assert all("usage" not in chunk for chunk in ask(http, path, body))


def test_no_chunk_has_an_empty_text(tool_server: RunningServer) -> None:
    said = '<think>Hm.</think><tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    tool_server.engine.script = lambda ids: as_bytes(said)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {**CHAT, "stream": True, "logprobs": True, "tools": tools}
    with httpx.Client(base_url=tool_server.url, timeout=HANG_S) as client:
        chunks = ask(client, "/v1/chat/completions", body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "" not in [delta.get("content") for delta in deltas]
    assert [delta.get("role") for delta in deltas].count("assistant") == 1

"""The table of limits: every entry is looked after, can be set, is counted, and stands in
docs/reference/limits.md."""

from __future__ import annotations

import re
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake import CONTEXT, HANG_S, RunningServer, SkippingLoop, eventually, running
from weft.config import numbers
from weft.config.limits import Limits
from weft.config.options import options_of
from weft.messages.codec import ToEngine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import GenerateRequest
from weft.server.errors import ApiError, error_response
from weft.server.http.protocol import IDLE_S
from weft.server.limits import BOUNDS

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
NATIVE = "/generate"
HI = [{"role": "user", "content": "Hi"}]
FIVE_NEW = {"sampling_params": {"max_new_tokens": 5}}
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"


def refusals(http: httpx.Client, limit: str) -> float:
    found = re.search(
        rf'^weft:refused_total{{limit="{limit}"}} (\S+)', http.get("/metrics").text, re.MULTILINE
    )
    return float(found[1]) if found else 0.0


CASES: list[
    tuple[str, float, str, dict[str, Any], int]
] = [  # limit, its value, path, a body beyond it, status
    ("max_body_mb", 0.001, TEXT, {"prompt": "a" * 1_100}, 413),
    (
        "max_body_parts",
        6,
        TEXT,
        {"prompt": "a" * 20_000, "logit_bias": {"1": 1, "2": 1, "3": 1, "4": 1}},
        400,
    ),
    ("max_json_depth", 4, CHAT, {"messages": HI, "chat_template_kwargs": {"a": [[[[1]]]]}}, 400),
    ("max_json_values", 50, CHAT, {"messages": HI, "chat_template_kwargs": {"a": [1] * 60}}, 400),
    ("max_prompts", 2, TEXT, {"prompt": ["a", "b", "c"]}, 400),
    ("max_prompts", 2, NATIVE, {"input_ids": [[1], [2], [3]]}, 400),
    ("max_n", 3, TEXT, {"prompt": "a", "n": 4}, 400),
    ("max_n", 3, NATIVE, {"text": "a", "sampling_params": {"n": 4}}, 400),
    ("max_completions", 4, TEXT, {"prompt": ["a", "b"], "n": 3}, 400),
    ("max_request_tokens", 100, TEXT, {"prompt": [[1] * 10] * 6, "n": 2}, 400),
    ("max_messages", 2, CHAT, {"messages": HI * 3}, 400),
    ("max_tools", 1, CHAT, {"messages": HI, "tools": [{}, {}], "tool_choice": "none"}, 400),
    ("max_stop_strings", 1, TEXT, {"prompt": "a", "stop": ["b", "c"]}, 400),
    ("max_stop_len", 3, CHAT, {"messages": HI, "stop": ["abcd"]}, 400),
    ("max_total_stop_len", 5, TEXT, {"prompt": "a", "stop": ["abc", "bcd"]}, 400),
    ("max_stop_token_ids", 1, TEXT, {"prompt": "a", "stop_token_ids": [1, 2]}, 400),
    ("max_logit_bias", 1, TEXT, {"prompt": "a", "logit_bias": {"1": 1, "2": 1}}, 400),
    ("max_stop_strings", 1, TEXT, {"prompt": "a", "stop_regex": ["b", "c"]}, 400),
    ("max_stop_len", 3, NATIVE, {"text": "a", "sampling_params": {"stop_regex": "abcd"}}, 400),
    (
        "max_total_stop_len",
        5,
        CHAT,
        {"messages": HI, "stop_regex": ["abc"], "bad_words": ["bcd"]},
        400,
    ),
    ("max_allowed_token_ids", 2, TEXT, {"prompt": "a", "allowed_token_ids": [1, 2, 3]}, 400),
    ("max_total_logit_bias", 3, TEXT, {"prompt": ["a", "b"], "allowed_token_ids": [1, 2]}, 400),
    (
        "max_total_logit_bias",
        9,
        TEXT,
        {"prompt": "a", "custom_logit_processor": "x", "custom_params": {"a": "b" * 9}},
        400,
    ),
    ("max_bad_words", 1, CHAT, {"messages": HI, "bad_words": ["b", "c"]}, 400),
    ("max_processors", 1, NATIVE, {"text": "a", "custom_logit_processor": ["x", "y"]}, 400),
    ("max_total_grammar_len", 5, TEXT, {"prompt": ["a", "b"], "regex": "abc"}, 400),
    ("max_total_logit_bias", 3, TEXT, {"prompt": ["a", "b"], "logit_bias": {"1": 1, "2": 1}}, 400),
    ("max_logprobs", 1, TEXT, {"prompt": "a", "logprobs": 2}, 400),
    ("max_logprob_token_ids", 2, NATIVE, {"text": "a", "token_ids_logprob": [[1, 2, 3]]}, 400),
    (
        "max_total_prompt_logprobs",
        20,
        TEXT,
        {"prompt": ["ab", "abc"], "n": 2, "prompt_logprobs": 2},
        400,
    ),
    (
        "max_total_hidden_values",
        70,
        TEXT,
        {"prompt": ["a", "b"], "n": 12, "return_hidden_states": True},
        400,
    ),
    (
        "max_total_hidden_values",
        17,
        NATIVE,
        {"text": "a", **FIVE_NEW, "return_hidden_states": True},
        400,
    ),
    ("max_total_embed_values", 5, NATIVE, {"input_embeds": [[1, 2, 3], [4, 5, 6]]}, 400),
    (
        "max_open_embeds_mb",
        0.00004,
        NATIVE,
        {"input_embeds": [[1, 2, 3], [4, 5, 6]], "sampling_params": {"n": 2}},
        503,
    ),
    ("max_detokenized", 3, "/detokenize", {"tokens": [[1, 2], [3, 4]]}, 400),
    (
        "max_parsed_len",
        3,
        "/separate_reasoning",
        {"text": "abcd", "reasoning_parser": "qwen3"},
        400,
    ),
    ("max_rid_len", 8, TEXT, {"prompt": "a", "rid": "123456789"}, 400),
    ("max_salt_len", 3, TEXT, {"prompt": "a", "cache_salt": "abcd"}, 400),
    ("max_timeout_ms", 10, TEXT, {"prompt": "a", "timeout_ms": 11}, 400),
]
ON_BYTES = {"max_url_bytes", "max_header_bytes", "max_headers", "max_framing_bytes"}
ON_CONNECTIONS = {
    "max_connections",
    "head_timeout_s",
    "body_timeout_s",
    "stall_timeout_s",
    "keep_alive_s",
}
ON_EARLY_ANSWERS = {"linger_s", "linger_mb"}  # tests/server/test_connections.py
ON_MEDIA = {  # tests/server/test_media.py
    "max_media_mb",
    "max_image_pixels",
    "max_video_frames",
    "max_video_pixels",
    "max_audio_s",
}
ON_SPEECH = {"max_speech_s"}  # tests/server/test_speech.py
ON_BATCHES = {  # tests/server/test_batches.py
    "max_file_mb",
    "max_files",
    "max_batch_lines",
    "max_open_batches",
}
CUTS = {"max_user_len", "max_pending_tokens", "max_request_share"}  # nobody is refused


@pytest.mark.parametrize(
    ("limit", "value", "path", "body", "status"), CASES, ids=[case[0] for case in CASES]
)
def test_limit_is_kept_and_counted(
    limit: str, value: float, path: str, body: dict[str, Any], status: int
) -> None:
    with (
        running(limits=replace(Limits(), **{limit: value})) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert refusals(http, limit) == 1
        assert server.engine.seen == []


@pytest.mark.parametrize(
    ("limit", "value", "headers", "query", "status"),
    [
        ("max_url_bytes", 64, {}, "a" * 100, 414),
        ("max_headers", 8, {f"x-{number}": "" for number in range(9)}, "", 431),
        ("max_header_bytes", 512, {"x-long": "a" * 600}, "", 431),
    ],
)
def test_limits_of_the_head_are_kept_and_counted(
    limit: str, value: int, headers: dict[str, str], query: str, status: int
) -> None:
    with (
        running(limits=replace(Limits(), **{limit: value})) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert http.get(f"/health?{query}", headers=headers).status_code == status
        assert refusals(http, limit) == 1


def test_every_limit_has_a_test() -> None:
    tested = {case[0] for case in CASES} | ON_BYTES | ON_CONNECTIONS | ON_EARLY_ANSWERS | CUTS
    tested |= ON_MEDIA | ON_SPEECH | ON_BATCHES
    assert tested == {field.name for field in fields(Limits)}
    assert {bound.limit for bound in BOUNDS} <= tested


def test_nothing_can_be_set_beyond_what_the_engine_is_made_for() -> None:
    most = {option.name: option.high for option in options_of(Limits)}
    assert most["max_n"] == numbers.MAX_N
    assert most["max_stop_strings"] == numbers.MAX_STOP_STRINGS
    assert most["max_stop_len"] == numbers.MAX_STOP_LEN
    assert most["max_stop_token_ids"] == numbers.MAX_STOP_TOKEN_IDS
    assert most["max_logit_bias"] == numbers.MAX_LOGIT_BIAS
    assert most["max_allowed_token_ids"] == numbers.MAX_ALLOWED_TOKEN_IDS
    assert most["max_bad_words"] == numbers.MAX_BAD_WORDS
    assert most["max_processors"] == numbers.MAX_PROCESSORS
    assert most["max_logprobs"] == numbers.MAX_LOGPROBS
    assert most["max_logprob_token_ids"] == numbers.MAX_LOGPROB_TOKEN_IDS


def test_the_document_tells_every_limit_as_it_is() -> None:
    rows = re.findall(
        r"^\| `(--[\w-]+)` \| ([\d.,]+) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE
    )
    told = {flag: float(number.replace(",", "")) for flag, number in rows}
    assert told == {option.flag: float(option.default) for option in options_of(Limits)}


def test_the_document_tells_every_range_as_it_is() -> None:
    section = DOCUMENT.read_text("utf-8").partition("## Numbers")[2].partition("## Notes")[0]
    told = {
        name: words
        for names, words in re.findall(r"^\| (`.*`) \| [\w ]+ \| (.+) \|$", section, re.MULTILINE)
        for name in re.findall(r"`(\??\w+)`", names)
    }
    ranges = {
        name: "the vocabulary" if one.is_token else one.allowed
        for name, one in numbers.NUMBERS.items()
    }
    assert told == ranges | {f"?{name}": one.allowed for name, one in numbers.QUERIES.items()}


def test_a_full_queue_tells_the_time_that_the_engine_has_worked_out(
    http: httpx.Client, server: RunningServer
) -> None:
    def refuse(message: ToEngine) -> None:
        assert isinstance(message, GenerateRequest)
        finish = Finish(id=message.id, reason="error", status=503, message="full", retry_after_s=17)
        server.engine.answer(StepOutput(finished=[finish]))

    server.engine.send = refuse  # type: ignore[method-assign]
    for stream in (False, True):
        answer = http.post(TEXT, json={"prompt": "x", "stream": stream})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "17"


@pytest.mark.parametrize("status", [429, 503])
def test_each_refusal_for_now_tells_when_to_come_back(status: int) -> None:
    assert error_response(ApiError(status, "no")).headers["retry-after"] == "1"
    later = ApiError(status, "no", headers={"retry-after": "5", "connection": "close"})
    assert error_response(later).headers["retry-after"] == "5"
    assert "retry-after" not in error_response(ApiError(400, "no")).headers


def test_prompts_together_have_a_limit() -> None:
    with (
        running(limits=Limits(max_request_tokens=100)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert http.post(TEXT, json={"prompt": [[1] * 10] * 5, "n": 2}).status_code == 200
        answer = http.post(TEXT, json={"prompt": [[1] * 10] * 6, "n": 2})
        assert "120 prompt tokens" in answer.json()["error"]["message"]


def test_long_user_is_cut(http: httpx.Client, server: RunningServer) -> None:
    assert http.post(TEXT, json={"prompt": "x", "user": "u" * 1_000_000}).status_code == 200
    assert server.engine.seen[-1].user == "u" * Limits().max_user_len


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_deep_and_huge_json_is_refused_at_once(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    deep = (
        b'{"chat_template_kwargs":'
        + b'{"a":' * 400
        + b"1"
        + b"}" * 400
        + b',"messages":[{"role":"user","content":"x"}]}'
    )
    deeper = b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    huge = b'{"max_tokens":' + b"9" * 5_000 + b',"prompt":"x","text":"x","messages":[]}'
    for body in (deep, deeper, huge):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
    assert server.engine.seen == []


def test_a_compressed_body_is_no_way_around(http: httpx.Client) -> None:
    import gzip

    bomb = gzip.compress(b'{"prompt":"' + b"a" * 10_000_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert http.post(TEXT, content=bomb, headers=headers).status_code == 400


def test_slow_body_is_ended_by_its_time() -> None:
    limits = Limits(body_timeout_s=600)
    with (
        running(new_loop=SkippingLoop, limits=limits) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"
            )
            assert eventually(lambda: any(one._head_len < 0 for one in server.connections))
            server.skip(600)
            assert slow.recv(1_000).startswith(b"HTTP/1.1 408")
        assert refusals(http, "body_timeout_s") == 1


def test_slow_head_is_counted() -> None:
    limits = Limits(head_timeout_s=600)
    with (
        running(new_loop=SkippingLoop, limits=limits) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as slow:
            slow.sendall(b"GET / HT")
            assert eventually(lambda: any(one._head_len > 0 for one in server.connections))
            server.skip(600)
            assert slow.recv(1) == b""
        assert refusals(http, "head_timeout_s") == 1


def test_reader_of_a_whole_answer_that_stops_reading_is_cut_off() -> None:
    with running(limits=Limits(stall_timeout_s=0.3)) as server:
        server.engine.script = lambda ids: [97] * 1_900
        body = b'{"prompt":["a","b","c","d"],"n":8,"max_tokens":1900,"logprobs":5}'
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )
            assert eventually(lambda: server.client.num_open == 0 and server.engine.seen)
            assert eventually(lambda: not server.connections)
        with httpx.Client(base_url=server.url) as http:
            assert refusals(http, "stall_timeout_s") == 1


def test_idle_connections_make_room_for_new_ones() -> None:
    limits = Limits(max_connections=8)
    with (
        running(new_loop=SkippingLoop, limits=limits) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        assert eventually(lambda: len(server.connections) == 8)
        server.skip(IDLE_S)
        assert http.post(TEXT, json={"prompt": "x"}).status_code == 200
        assert refusals(http, "max_connections") == 1
        idle[0].settimeout(HANG_S)
        assert idle[0].recv(1) == b""  # it has waited longest
        assert len(server.connections) == 8
        for connection in idle:
            connection.close()


def test_beyond_the_limit_requests_are_reported_and_health_answers() -> None:
    limits = Limits(max_connections=4)
    with running(limits=limits) as server:
        server.engine.hold = True
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n"
            + b'{"prompt":"x"}'
        )
        busy = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        for connection in busy:
            connection.sendall(head)
        assert eventually(lambda: server.client.num_open == 4)
        refused = httpx.post(f"{server.url}{TEXT}", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert httpx.get(f"{server.url}/health").status_code == 200
        crowd = [
            socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)
        ]  # beyond the last place, too
        for connection in (*busy, *crowd):
            connection.close()
        server.engine.hold = False
        assert eventually(lambda: server.client.num_open == 0 and not server.connections)
        assert httpx.post(f"{server.url}{TEXT}", json={"prompt": "x"}).status_code == 200


def test_full_queue_is_reported_with_a_time_to_come_back(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.full = True
    answer = http.post(TEXT, json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "queue is full" in answer.json()["error"]["message"]


def test_the_context_bounds_what_log_probabilities_can_cost(
    http: httpx.Client, server: RunningServer
) -> None:
    body = {"prompt": [1] * (CONTEXT + 1), "logprobs": 5}
    assert http.post(TEXT, json=body).json()["error"]["code"] == "context_length_exceeded"
    assert server.engine.seen == []


def test_nothing_is_fetched_for_a_client(http: httpx.Client, server: RunningServer) -> None:
    for url in (
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "http://a\\@b",
        "data:image/png;base64,AA==",
    ):
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
        assert answer.status_code == 400
    assert server.engine.seen == []


@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
def test_too_many_prompts_are_refused(http: httpx.Client, server: RunningServer, path: str) -> None:
    for count in (1_025, 100_000):
        answer = http.post(path, json={"prompt": ["a"] * count})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert f"{count:,}" in answer.json()["error"]["message"]
    assert server.engine.seen == []


def test_many_slow_connections_do_not_slow_down_others() -> None:
    with running() as server, httpx.Client(base_url=server.url) as http:
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        for number, connection in enumerate(slow):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" if number % 2 else b"G")
        for _ in range(30):
            assert http.post(TEXT, json={"prompt": "x"}).status_code == 200
        for connection in slow:
            connection.close()


def test_output_of_a_model_is_never_served_as_a_page(
    http: httpx.Client, server: RunningServer
) -> None:
    script = "<script>alert(1)</script>"
    server.engine.script = lambda ids: list(script.encode())
    for path, body in (
        (TEXT, {"prompt": "x", "max_tokens": 50}),
        (NATIVE, {"text": "x"}),
        ("/nowhere", {}),
    ):
        answer = http.post(path, json=body)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
        assert "set-cookie" not in answer.headers


def test_a_form_of_another_page_is_no_request(http: httpx.Client, server: RunningServer) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        headers = {"content-type": kind, "origin": "http://evil.example"}
        for path in (TEXT, "/abort_request"):
            assert http.post(
                path, content=b'{"prompt":"x","abort_all":true}', headers=headers
            ).status_code in (
                403,
                415,
            )
    assert server.engine.seen == []

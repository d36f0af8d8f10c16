"""What clients get wrong, by mistake or on purpose: always a 4xx in OpenAI's form, and the server
goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, cast

import httpx
import msgspec
import pytest

from tests.server import raw
from tests.server.fake import CONTEXT, HANG_S, RunningServer, eventually
from weft.messages.sampling import InvalidParam
from weft.messages.status import EngineReady
from weft.relay.body import SeenBody
from weft.route.policy import RoutedRequest
from weft.server.body import _require_nothing
from weft.server.errors import ApiError
from weft.server.fields.input_embeds import read_embeds

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
DEFAULTS: dict[str, dict[str, Any]] = {CHAT: HI, TEXT: {"prompt": "x"}}


def refused(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]
    if param is not None:
        assert error["param"] == param
    assert "/work" not in answer.text
    assert "Traceback" not in answer.text


@pytest.fixture(autouse=True)
def server_is_well_afterwards(server: RunningServer, http: httpx.Client) -> Iterator[None]:
    yield
    assert eventually(lambda: server.client.num_open == 0)
    assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


def post(http: httpx.Client, path: str, data: bytes, **headers: str) -> httpx.Response:
    return http.post(path, content=data, headers={"content-type": "application/json"} | headers)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"{",
            b"[1]",
            b"null",
            b'"text"',
            b'{"prompt":"\xff"}',
            b'{"messages":[{"role":"user","content":"\xff"}]}',
        ),
        *(b'{"a":' + b"[" * 20_000, b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        *(b'{"n":' + b"9" * 5_000 + b"}", b'{"temperature":NaN}', b"{}"),
    ],
    ids=lambda body: body[:20],
)
def test_broken_body_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    refused(post(http, path, body), 400)


def test_wrong_content_type_is_a_415(http: httpx.Client) -> None:
    body = json.dumps(HI).encode()
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        refused(http.post(CHAT, content=body, headers={"content-type": kind}), 415)
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        assert http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200


def refuse_field(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: object, param: str
) -> None:
    answer = http.post(path, json={**HI, "prompt": "x", "max_tokens": 5, field: value})
    refused(answer, 404 if field == "model" else 400, param=param)
    assert server.engine.seen == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1, 1e30, 2.1, "0.5", True)],
        *[("top_p", value) for value in (2, -0.1)],
        *[("top_k", value) for value in (-5, 2**31, 1.5)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("frequency_penalty", value) for value in (100, -100)],
        *[("presence_penalty", value) for value in (100, -100)],
        *[("repetition_penalty", value) for value in (0, -1, 100)],
        *[("seed", value) for value in (2**63, "x")],
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_number_out_of_range_names_its_field(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: object
) -> None:
    refuse_field(http, server, path, field, value, field)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize(
    "field", [b"temperature", b"top_p", b"frequency_penalty", b"repetition_penalty"]
)
def test_no_number_reaches_the_sampler_that_is_none(
    http: httpx.Client, server: RunningServer, field: bytes, value: bytes
) -> None:
    refused(post(http, TEXT, b'{"prompt":"x","%s":%s}' % (field, value)), 400)
    assert server.engine.seen == []


@pytest.mark.parametrize("value", [0, -1, 65, 20_000, 10**9, 10**18])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_too_many_completions_are_refused(
    http: httpx.Client, server: RunningServer, path: str, value: int
) -> None:
    refuse_field(http, server, path, "n", value, "n")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -2, 10**9)],
        *[("min_tokens", value) for value in (-1, 10**6)],
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_impossible_lengths_are_refused(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: int
) -> None:
    refuse_field(http, server, path, field, value, field)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        *[
            ("stop_token_ids", value, "stop_token_ids")
            for value in ([-1], [2**31], [2**63], [1] * 2_000)
        ],
        ("stop_token_ids", ["1"], "stop_token_ids[0]"),
        *[
            ("logit_bias", value, "logit_bias")
            for value in ({"270": 1}, {"-1": 1}, {"a": 1}, {"": 1}, {"1.0": 1})
        ],
        ("logit_bias", {str(id): 1 for id in range(100_000)}, "logit_bias"),
        ("logit_bias", {"1": 1000}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_outside_of_the_vocabulary_are_refused(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: object, param: str
) -> None:
    refuse_field(http, server, path, field, value, param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_token_of_the_vocabulary_may_have_a_bias(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    answer = http.post(
        path, json={**prompt, "max_tokens": 1, "logit_bias": {"0": 1, "101": 1, "269": -1}}
    )
    assert answer.status_code == 200
    assert server.engine.seen[0].sampling.logit_bias == {0: 1.0, 101: 1.0, 269: -1.0}


@pytest.mark.parametrize("value", ["", ["a", ""], ["a"] * 1_000, "a" * 1_000_000, "a" * 1_025, 5])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stop_strings_have_bounds(
    http: httpx.Client, server: RunningServer, path: str, value: object
) -> None:
    refuse_field(http, server, path, "stop", value, "stop")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 9_999}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (TEXT, {"logprobs": 9_999}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"prompt_logprobs": 9_999}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (
            "/generate",
            {"text": "x", "return_logprob": True, "top_logprobs_num": 9_999},
            "top_logprobs_num",
        ),
        (
            "/generate",
            {"text": ["x", "y"], "return_logprob": True, "top_logprobs_num": [1, 999]},
            "top_logprobs_num",
        ),
    ],
)
def test_too_many_logprobs_are_refused(
    http: httpx.Client, server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    refused(http.post(path, json={**DEFAULTS.get(path, {}), **body}), 400, param=param)
    assert server.engine.seen == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**40),
        ("rid", "x" * 129),
        ("rid", "a\r\nb"),
        ("cache_salt", "x" * 257),
        ("timeout_ms", 10**12),
        ("model", "other"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_names_and_numbers_beside_sampling_have_bounds_too(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: object
) -> None:
    refuse_field(http, server, path, field, value, field)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", ""]}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 1_025}, "prompt"),
        (TEXT, {"prompt": ["a"] * 100_000}, "prompt"),
        (TEXT, {"prompt": [1] * 1_000_000}, "prompt"),
        (TEXT, {"prompt": ["a"] * 1_000, "n": 64}, "n"),
        (TEXT, {"prompt": [[1] * 1_900] * 200, "n": 64}, "n"),
        (TEXT, {"stop": ["a" * 1_024] * 17}, "stop"),
        (
            TEXT,
            {"prompt": ["a"] * 64, "n": 64, "logit_bias": {str(id): 1 for id in range(260)}},
            "logit_bias",
        ),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [270]}, "prompt"),
        (TEXT, {"prompt": [2**62]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [HI["messages"][0]] * 16_385}, "messages"),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": "file:///"}]}
                ]
            },
            None,
        ),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (CHAT, {"input_ids": []}, "input_ids"),
        (CHAT, {"input_ids": [300]}, "input_ids"),
        ("/generate", {"text": "x", "input_ids": [1]}, "text"),
        ("/generate", {}, "text"),
        ("/generate", {"input_ids": []}, "prompt"),
        ("/generate", {"input_ids": [1, [2]]}, "input_ids"),
        ("/generate", {"text": []}, "text"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"text": "x", "sampling_params": {"n": 65}}, "n"),
        ("/generate", {"text": "x", "sampling_params": {"n": 0}}, "sampling_params.n"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"temperature": -1}},
            "sampling_params.temperature",
        ),
        ("/generate", {"text": "x", "rid": ["a", "b"]}, "rid"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ],
)
def test_odd_request_names_its_field(
    http: httpx.Client, server: RunningServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = http.post(path, json={**DEFAULTS.get(path, {}), **body})
    refused(answer, 400)
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert server.engine.seen == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_labels", {"team": "a"}),
        ("return_sampling_mask", True),
        ("return_input_ids_in_sglext", True),
        ("return_output_ids_in_sglext", True),
        ("documents", [1]),
        ("use_beam_search", True),
        ("modalities", ["text", "audio"]),
        ("function_call", "auto"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_that_are_not_supported_yet_are_refused_by_name(
    http: httpx.Client, server: RunningServer, path: str, field: str, value: object
) -> None:
    body = {**HI, "prompt": "x"}
    refused(
        http.post(path, json={**body, field: value}),
        400,
        f"{field} is not supported yet",
        param=field,
    )
    for nothing in (None, False, [], {}, ""):
        assert http.post(path, json={**body, field: nothing}).status_code == 200


def test_sizes_of_pictures_are_refused_where_no_picture_is_taken(http: httpx.Client) -> None:
    body = {**HI, "mm_processor_kwargs": {"max_pixels": 8}}
    refused(http.post(CHAT, json=body), 400, "mm_processor_kwargs has 'max_pixels'; nothing can be")
    assert http.post(CHAT, json={**HI, "mm_processor_kwargs": {}}).status_code == 200


def test_other_things_that_are_not_there_yet(http: httpx.Client) -> None:
    assert http.post(CHAT, json={**HI, "response_format": {"type": "text"}}).status_code == 200
    body = {"text": "x", "sampling_params": {"beam_width": 2}}
    refused(
        http.post("/generate", json=body), 400, "sampling_params.beam_width is not supported yet"
    )


def test_the_error_for_an_unknown_word_lists_the_allowed_ones(http: httpx.Client) -> None:
    body = {**HI, "truncation_side": "boss" + "!" * 100_000}
    answer = http.post(CHAT, json=body)
    refused(answer, 400, "truncation_side is 'boss!", "left, right are allowed")
    assert answer.json()["error"]["param"] == "truncation_side"
    assert len(answer.text) < 1_000


def test_an_empty_body_is_reported_as_such(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b" ", headers={"content-type": "application/json"})
    refused(answer, 400, "the body is empty; a JSON object is needed")


def test_unknown_fields_are_ignored_and_counted(http: httpx.Client) -> None:
    def count() -> float:
        lines = http.get("/metrics").text.splitlines()
        return next(
            float(line.split()[1])
            for line in lines
            if line.startswith("weft:unknown_request_fields_total")
        )

    before = count()
    assert http.post(CHAT, json={**HI, "no_such_field": 1, "nor_this": [2]}).status_code == 200
    assert count() == before + 2


def test_prompt_beyond_the_context_names_both_numbers(http: httpx.Client) -> None:
    refused(
        http.post(TEXT, json={"prompt": [1] * CONTEXT}),
        400,
        "2,000 tokens",
        "context of 2,000",
        param="prompt",
    )
    body = {"prompt": "a" * 1_990, "max_tokens": 11}
    refused(http.post(TEXT, json=body), 400, "1,990 tokens", "11", "2,000", param="max_tokens")
    chat = {"messages": [{"role": "user", "content": "a" * CONTEXT}]}
    refused(http.post(CHAT, json=chat), 400, "context of 2,000", param="messages")


def test_endless_text_is_refused_before_it_is_tokenized(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tokenizer, "_backend", None)  # who tokenizes gets an exception
    answer = http.post(TEXT, json={"prompt": "a" * 10_000_000})
    refused(answer, 400, "10,000,000 characters", "2,000 tokens", param="prompt")
    body = {"messages": [{"role": "user", "content": "a" * 10_000_000}]}
    refused(http.post(CHAT, json=body), 400, "characters", "2,000 tokens", param="messages")


def test_body_over_the_limit_is_a_413(http: httpx.Client) -> None:
    refused(
        http.post(CHAT, content=b"x" * 17_000_000, headers={"content-type": "application/json"}),
        413,
        "16 MB",
    )


def test_endless_chunked_body_is_cut_off_while_it_comes(server: RunningServer) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 10**9:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
        try:
            answer = http.post(
                CHAT, content=endless(), headers={"content-type": "application/json"}
            )
        except httpx.TransportError:
            pass  # cut off before the answer was read
        else:
            assert answer.status_code == 413
    assert sent < 10**9


def test_large_head_is_refused(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        refused(http.get("/version", headers={"x-long": "a" * 40_000}), 431)
        refused(http.get("/version", headers={f"x-{number}": "a" for number in range(200)}), 431)
        refused(http.get("/version", params={"q": "a" * 10_000}), 414)
    with raw.connected(server) as connection:
        connection.sendall(raw.head("GET /" + "a" * 70_000))
        assert raw.read_reply(connection).status == 414


@pytest.mark.parametrize(
    "beginning", [b"GET /" + b"a" * 10**6, b"GET / HTTP/1.1\r\nx-long: " + b"a" * 10**6]
)
def test_head_without_end_is_cut_off(server: RunningServer, beginning: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection:
        try:
            connection.sendall(beginning)
            answer = connection.recv(1_000)
            while connection.recv(1_000):
                pass
        except ConnectionError:
            return
    assert answer.startswith(b"HTTP/1.1 431") or answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"SSH-2.0-scan\r\n\r\n",
        b"\0" * 4_096,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_bytes_of_port_scanners_are_refused_and_disturb_no_request(
    server: RunningServer, junk: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as connection:
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1_000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "allowed", "fields"),
    [
        (CHAT, "max_tokens", "it must be at least 1, but for echo and prompt_logprobs of", HI),
        (CHAT, "max_completion_tokens", "1 or more are allowed", HI),
        ("/v1/responses", "max_output_tokens", "1 or more are allowed", {"input": "x"}),
    ],
)
def test_no_tokens_are_refused_by_the_name_that_the_client_uses(
    http: httpx.Client, path: str, field: str, allowed: str, fields: dict[str, object]
) -> None:
    answer = http.post(path, json={**fields, field: 0})
    refused(answer, 400, f"{field} is 0; {allowed}", param=field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, "tool_choice": "required"}),
        ("/v1/responses", {"input": "x", "tool_choice": "required"}),
        ("/v1/messages", {**HI, "max_tokens": 1, "tool_choice": {"type": "any"}}),
    ],
)
def test_a_forced_call_without_tools_is_refused_in_no_words_of_another_api(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "tool_choice asks for a call, but there are no tools" in answer.text


def test_unknown_paths_and_methods_have_the_same_form(http: httpx.Client) -> None:
    refused(http.get("/no/such/path"), 404, "no route with this path; GET /docs lists")
    refused(http.post("/v1/chat/completions/"), 404)
    refused(http.get("/v1//models"), 404)
    refused(http.get("/V1/models"), 404)
    refused(http.get(CHAT), 405)
    refused(http.delete("/v1/models"), 405, "allowed methods: GET, HEAD")
    answer = http.put("/v1/files")  # a path with two routes
    refused(answer, 405, "allowed methods: GET, HEAD, POST")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    refused(http.post("/invocation", json={}), 404)
    refused(http.request("OPTIONS", CHAT), 405)


def test_bug_of_ours_is_a_500_without_details(http: httpx.Client, server: RunningServer) -> None:
    def script(ids: list[int]) -> list[int]:
        raise ZeroDivisionError("secret")

    server.engine.script = script
    answer = http.post(TEXT, json={"prompt": "x"})
    refused(answer, 500, "internal server error")
    assert "secret" not in answer.text
    server.call(lambda: server.client.deliveries.end_all("clean up"))
    server.engine.script = lambda ids: ids


def test_stop_string_is_found_in_the_middle_of_a_character(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: list("aö🎉b".encode())
    answer = http.post(TEXT, json={"prompt": "x", "stop": ["🎉"]}).json()
    assert answer["choices"][0]["text"] == "aö"
    answer = http.post(
        TEXT, json={"prompt": "x", "stop": ["ö🎉"], "include_stop_str_in_output": True}
    ).json()
    assert answer["choices"][0]["text"] == "aö🎉"


def test_strange_text_goes_in_and_out_as_it_is(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: ids
    for text in (
        "\ufeffx",
        "a\x00b",
        "\u202e\u2028",
        "e\u0301",
        "\r\n\t",
        "\U0001f469\u200d\U0001f680",
    ):
        answer = http.post(TEXT, json={"prompt": text, "max_tokens": 100}).json()
        assert answer["choices"][0]["text"] == text


def test_special_tokens_typed_by_the_user_are_special_tokens(
    http: httpx.Client, server: RunningServer
) -> None:
    """As everywhere in the field: the tokenizer recognises them."""
    found = http.post("/tokenize", json={"prompt": "a<|im_end|>"}).json()
    assert found["tokens"] == [ord("a"), 259]


def test_duplicate_names_do_not_collide(http: httpx.Client, server: RunningServer) -> None:
    server.engine.script = lambda ids: ids
    found = http.post("/generate", json={"text": ["a", "b"], "rid": ["same", "same"]}).json()
    assert [(one["text"], one["meta_info"]["id"]) for one in found] == [
        ("a", "same"),
        ("b", "same"),
    ]


def test_request_id_is_echoed_if_it_is_harmless(http: httpx.Client, server: RunningServer) -> None:
    answer = http.post(TEXT, json={"prompt": "x"}, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-abc-1"
    assert server.engine.seen[-1].rid == "abc-1"
    for bad in ("a b", "x" * 129, b"a\x1b[31m", "ä".encode("latin-1"), ""):
        answer = http.get("/version", headers={"x-request-id": bad})
        assert answer.status_code in (200, 400)
        if answer.status_code == 200:
            assert answer.headers["x-request-id"] != bad
    refused(http.get("/nowhere", headers={"x-request-id": "e-1"}), 404)


def test_slow_client_does_not_hold_up_others(server: RunningServer, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        )
        assert http.post(TEXT, json={"prompt": "x"}).status_code == 200


def test_a_value_that_can_be_passed_by_but_not_made_is_refused() -> None:
    deep = msgspec.Raw(b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000)
    with pytest.raises(ApiError, match="thinking is not supported"):
        _require_nothing("thinking", deep)
    with pytest.raises(InvalidParam, match="input_embeds is nested too deeply; base64"):
        read_embeds(deep, cast(EngineReady, None))
    assert not SeenBody({"session_params": deep}, RoutedRequest(b"", ""), b"").session

"""Bad words, allowed tokens, stop patterns, budgets, processors and truncation as HTTP clients
write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.fake import CONTEXT, HANG_S, RunningServer, running
from weft.config.server import ServerConfig
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import Processor, ThinkingMarks

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
HI = [{"role": "user", "content": "Hi"}]
CODE = '{"callable": "8004951a0000"}'


def ask(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    """`fields` where this route has them."""
    if path == NATIVE:
        return http.post(path, json={"text": "Hi", "sampling_params": fields})
    return http.post(path, json={"messages": HI, "prompt": "Hi", **fields})


def seen(server: RunningServer, count: int = 1) -> list[GenerateRequest]:
    assert len(server.engine.seen) == count
    return server.engine.seen


def tokens(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_words_and_tokens_arrive_as_tokens(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    assert (
        ask(
            http, path, bad_words=["no way", " no way", "never"], allowed_token_ids=[5, 6]
        ).status_code
        == 200
    )
    [request] = seen(server)
    words = ("no way", " no way", "never", " never")
    assert request.sampling.bad_word_ids == tuple(map(tokens, words))
    assert request.sampling.allowed_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, "no token could be generated"),
        ({"allowed_token_ids": [1, 10**6]}, "token id 1000000"),
        ({"bad_words": [""]}, "not a word"),
        ({"bad_words": ["  "]}, "not a word"),
        ({"stop_regex": "a*"}, "matches the empty text"),
        ({"stop_regex": ["b", "(a"]}, "is not a regular expression"),
        ({"thinking_budget": -1}, "0 or more are allowed"),
        ({"thinking_budget": 5}, "no known format of reasoning"),
        (
            {"custom_logit_processor": CODE},
            "is serialised code, and code in a request is never run",
        ),
        ({"custom_logit_processor": 5}, "a name is needed"),
        (
            {"custom_logit_processor": [{"name": "a", "parameters": {}}]},
            "name and params are allowed",
        ),
        ({"custom_logit_processor": ["a", "b"], "custom_params": {"x": 1}}, "give several as"),
        ({"custom_logit_processor": "a", "custom_params": [1]}, "an object is needed"),
        ({"custom_params": {"x": 1}}, "custom_params needs custom_logit_processor"),
        ({"logits_processors": ["a.b.C"]}, "code in a request is never run"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_impossible_fields_are_named(
    http: httpx.Client, server: RunningServer, path: str, fields: dict[str, Any], message: str
) -> None:
    answer = ask(http, path, **fields)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].removeprefix("sampling_params.") in fields
    assert server.engine.seen == []


def test_processors_travel_with_their_parameters(http: httpx.Client, server: RunningServer) -> None:
    params = {"a": [1, {"b": None}]}
    assert ask(http, CHAT, custom_logit_processor="mine", custom_params=params).status_code == 200
    both = [{"name": "mine", "params": params}, "yours"]
    assert ask(http, TEXT, custom_logit_processor=both).status_code == 200
    native = {
        "text": "Hi",
        "custom_logit_processor": "mine",
        "sampling_params": {"custom_params": params},
    }
    assert http.post(NATIVE, json=native).status_code == 200
    beside = {"text": "Hi", "custom_logit_processor": "mine", "custom_params": params}
    assert http.post(NATIVE, json=beside).status_code == 200
    one, two, three, four = (request.sampling.processors for request in seen(server, 4))
    assert one == three == four == (Processor("mine", params),)
    assert two == (Processor("mine", params), Processor("yours"))


# Stop patterns


def streamed(http: httpx.Client, **fields: Any) -> str:
    answer = ask(http, TEXT, stream=True, **fields)
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"w\S+d", "Hello, "),
        (r"\bl|ll?|[^ -~]+!", "He"),
        (r"\W+w", "Hello"),
        ("zzz+", "Hello, wörld! 🎉"),
    ],
)
def test_a_stop_pattern_ends_the_text_alike_streamed_or_not(
    http: httpx.Client, server: RunningServer, pattern: str, text: str
) -> None:
    whole = ask(http, TEXT, stop_regex=pattern, max_tokens=50).json()["choices"][0]
    assert streamed(http, stop_regex=[pattern], max_tokens=50) == whole["text"] == text
    native = ask(http, NATIVE, stop_regex=pattern).json()
    assert native["text"] == text
    if pattern != "zzz+":
        assert whole["finish_reason"] == "stop"
        assert whole["matched_stop"] == pattern
        assert native["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        assert server.engine.aborted


def test_a_hostile_pattern_does_not_hold_the_server(http: httpx.Client) -> None:
    for pattern in (
        "(a+)+b",
        "(.*)(.*)(.*)(.*)(.*)x",
        "((a{1,1000}){1,1000}){1,1000}",
        "(" * 2_000,
        "(e|e)*(l?){20}z",
    ):
        answer = ask(http, TEXT, stop_regex=pattern, max_tokens=50)
        assert answer.status_code in (200, 400)


# Truncation


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 99}, list(range(10))),
        ({"truncate_prompt_tokens": -1}, list(range(10))),
    ],
)
def test_a_prompt_can_be_cut(
    http: httpx.Client, server: RunningServer, fields: dict[str, Any], kept: list[int]
) -> None:
    ids = list(range(10))
    assert http.post(TEXT, json={"prompt": ids, "echo": True, **fields}).status_code == 200
    assert http.post(CHAT, json={"messages": HI, "input_ids": ids, **fields}).status_code == 200
    assert http.post(NATIVE, json={"input_ids": ids, **fields}).status_code == 200
    assert [list(request.input_ids[::4]) for request in seen(server, 3)] == [kept] * 3


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_a_prompt_beyond_the_context_can_be_cut_to_what_fits(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    long = "a" * (3 * CONTEXT)
    body = (
        {"messages": [{"role": "user", "content": long}]}
        if path == CHAT
        else {"prompt": long, "text": long}
    )
    body = {**body, "max_tokens": 16, "sampling_params": {"max_new_tokens": 16}}
    assert http.post(path, json=body).status_code == 400
    answer = http.post(path, json={**body, "truncate_prompt_tokens": -1})
    assert answer.status_code == 200, answer.text
    [request] = seen(server)
    assert len(request.input_ids) // 4 == CONTEXT - 16


def test_a_server_can_cut_every_prompt_that_is_too_long() -> None:
    with (
        running(ServerConfig(drain_s=1.0, auto_truncate=True)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        long = {
            "prompt": "a" * CONTEXT,
            "text": "a" * CONTEXT,
            "messages": [{"role": "user", "content": "a" * CONTEXT}],
        }
        for path in (TEXT, CHAT, NATIVE):
            sampling = {"max_tokens": 100, "sampling_params": {"max_new_tokens": 100}}
            assert http.post(path, json={**long, **sampling}).status_code == 200
        short = {"prompt": "abc", "max_tokens": 5}
        assert http.post(TEXT, json=short).status_code == 200
        assert [len(one.input_ids) // 4 for one in seen(server, 4)] == [CONTEXT - 100] * 3 + [3]


@pytest.mark.parametrize("most", [0, -2])
def test_a_prompt_cannot_be_cut_to_nothing(http: httpx.Client, most: int) -> None:
    for path in (CHAT, TEXT):
        answer = ask(http, path, truncate_prompt_tokens=most)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


# Budgets of reasoning


@pytest.fixture
def thinker(tool_server: RunningServer) -> Callable[..., httpx.Response]:
    def ask(path: str, **fields: Any) -> httpx.Response:
        body = {"messages": HI, "prompt": "Hi", "text": "Hi", **fields}
        return httpx.post(tool_server.url + path, json=body, timeout=HANG_S)

    return ask


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        (CHAT, {"thinking_budget": 7}, 7),
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        (CHAT, {"thinking": {"type": "disabled"}}, 0),
        (CHAT, {"thinking": False}, 0),
        (CHAT, {"thinking": True}, None),
        (CHAT, {"reasoning_effort": "none"}, 0),
        (CHAT, {"reasoning_effort": "low"}, None),
        (CHAT, {"thinking_budget": 7, "response_format": {"type": "json_object"}}, 7),
        (TEXT, {"thinking_token_budget": 7}, 7),
        (NATIVE, {"max_thinking_tokens": 7}, 7),
        (NATIVE, {"sampling_params": {"thinking_budget": 7}}, 7),
        ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    ],
)
def test_a_budget_has_many_names(
    thinker: Callable[..., httpx.Response],
    tool_server: RunningServer,
    path: str,
    fields: dict[str, Any],
    budget: int | None,
) -> None:
    answer = thinker(path, **fields)
    assert answer.status_code == 200, answer.text
    sampling = seen(tool_server)[0].sampling
    assert sampling.thinking_budget == budget
    marks = ThinkingMarks(tokens("<think>"), tokens("</think>"), is_open=False)
    assert sampling.thinking_marks == (None if budget is None else marks)


# Names of tokens


def test_tokens_can_be_called_by_their_ids(http: httpx.Client) -> None:
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    chat = ask(http, CHAT, logprobs=True, top_logprobs=1, **asked).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [(one["token"], one["top_logprobs"][0]["token"]) for one in chat] == [
        ("token_id:72", "token_id:72"),
        ("token_id:101", "token_id:101"),
    ]
    text = ask(http, TEXT, logprobs=1, **asked).json()["choices"][0]["logprobs"]
    assert text["tokens"] == ["token_id:72", "token_id:101"]
    assert [list(top) for top in text["top_logprobs"]] == [["token_id:72"], ["token_id:101"]]
    assert text["text_offset"] == [0, 1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_log_probabilities_of_no_other_tokens(http: httpx.Client, path: str) -> None:
    asked = {"logprobs": True, "top_logprobs": 0} if path == CHAT else {"logprobs": 0}
    found = ask(http, path, max_tokens=1, **asked).json()["choices"][0]["logprobs"]
    if path == CHAT:
        assert found["content"][0]["token"] == "H"
        assert found["content"][0]["top_logprobs"] == []
    else:
        assert found["tokens"] == ["H"]
        assert found["top_logprobs"] == [{"H": -0.5}]


# Numbers as clients write them


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_a_whole_number_may_have_a_fraction_of_zero(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    fields = {"n": 1.0, "top_k": 5.0, "seed": -7.00, "temperature": 1.0, "stop": ["2.0"]}
    answer = ask(http, path, **fields)
    assert answer.status_code == 200, answer.text
    [request] = seen(server)
    sampling = request.sampling
    assert sampling.top_k == 5
    assert sampling.seed == -7
    assert sampling.stop == ("2.0",)
    wrong = ask(http, path, top_k=5.5)
    assert (wrong.status_code, "top_k is 5.5" in wrong.text) == (400, True)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_limit_of_tokens_is_written_as_minus_one(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    assert ask(http, path, max_tokens=-1).status_code == 200
    [request] = seen(server)
    num_prompt = len(request.input_ids) // 4
    assert request.sampling.max_new_tokens == CONTEXT - num_prompt


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_top_p_of_zero_leaves_the_likeliest_token(
    http: httpx.Client, server: RunningServer, path: str
) -> None:
    assert ask(http, path, top_p=0).status_code == 200
    [request] = seen(server)
    assert 0 < request.sampling.top_p < 1e-5

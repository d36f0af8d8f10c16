"""Log probabilities of the prompt, and of given tokens, in the shapes of SGLang, OpenAI and
vLLM."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake import RunningServer, as_bytes

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
HI = [{"role": "user", "content": "hi"}]


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# SGLang


def test_generate_tells_the_tokens_of_the_prompt_from_a_start_on(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes("x")
    body = {"text": "abcdef", "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = http.post(NATIVE, json=body | {"return_text_in_logprobs": True}).json()["meta_info"]
    assert meta["input_token_logprobs"][:2] == [[None, 98, "b"], [-99.0, 99, "c"]]
    assert meta["input_top_logprobs"][:2] == [None, [[-0.5, 100, "d"], [-1.5, 101, "e"]]]
    assert [len(meta[f"input_{kind}_logprobs"]) for kind in ("token", "top")] == [5, 5]
    assert "input_token_ids_logprobs" not in meta
    assert server.engine.seen[-1].recompute_from == 1


def test_generate_tells_given_tokens_in_every_place(http: httpx.Client) -> None:
    body = {
        "text": ["ab", "abc"],
        "return_logprob": True,
        "logprob_start_len": [0, -1],
        "sampling_params": {"n": 1},
    }
    both = http.post(NATIVE, json=body | {"token_ids_logprob": [[7, 8], [9]]}).json()
    first, second = (one["meta_info"] for one in both)
    assert first["input_token_ids_logprobs"] == [None, [[-7.0, 7, None], [-8.0, 8, None]]]
    assert first["output_token_ids_logprobs"][0] == [[-7.0, 7, None], [-8.0, 8, None]]
    assert second["output_token_ids_logprobs"][0] == [[-9.0, 9, None]]
    assert second["input_token_logprobs"] == []


def test_a_stream_of_generate_tells_the_prompt_at_its_beginning_and_its_end(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.step_s = 0.02  # an event for each token
    metas = [
        one["meta_info"]
        for one in events(
            http, NATIVE, {"text": "ab", "return_logprob": True, "logprob_start_len": 0}
        )
    ]
    has_prompt = ["input_token_logprobs" in meta for meta in metas]
    assert has_prompt[0]
    assert has_prompt[-1]
    assert sum(has_prompt) == 2 < len(metas)
    assert metas[0]["input_token_logprobs"] == [[None, 97, None], [-98.0, 98, None]]


def test_generate_of_no_token_computes_the_prompt_alone(http: httpx.Client) -> None:
    body = {
        "text": "abc",
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0},
    }
    answer = http.post(NATIVE, json=body).json()
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["input_token_logprobs"]) == 3
    assert answer["meta_info"]["output_token_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"logprob_start_len": 3}, "logprob_start_len is 3; the prompt has 3 tokens"),
        ({"logprob_start_len": -2}, "logprob_start_len is -2"),
        ({"token_ids_logprob": [1, [2]]}, "token_ids_logprob mixes"),
        (
            {"token_ids_logprob": [[1], [2]]},
            "token_ids_logprob has the length 2; 1 is expected, an entry for each prompt",
        ),
        ({"token_ids_logprob": [270]}, "token id 270; 0 to 269"),
    ],
)
def test_impossible_logprobs_are_refused(
    http: httpx.Client, fields: dict[str, Any], wrong: str
) -> None:
    answer = http.post(NATIVE, json={"text": "abc", "return_logprob": True, **fields})
    assert answer.status_code == 400
    assert wrong in answer.json()["error"]["message"]


# OpenAI


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_log_probabilities_of_the_prompt_in_front(
    http: httpx.Client, server: RunningServer, stream: bool
) -> None:
    server.engine.script = lambda ids: as_bytes("xyz")
    body = {"prompt": "aöb", "echo": True, "logprobs": 1, "max_tokens": 2}
    answers = events(http, TEXT, body) if stream else [http.post(TEXT, json=body).json()]
    choices = [answer["choices"][0] for answer in answers]
    parts = [choice["logprobs"] for choice in choices]
    assert "".join(choice["text"] for choice in choices) == "aöbxy"
    assert [name for part in parts for name in part["tokens"]] == [
        "a",
        "bytes:\\xc3",
        "bytes:\\xb6",
        "b",
        "x",
        "y",
    ]
    assert [value for part in parts for value in part["token_logprobs"]] == [
        None,
        -195.0,
        -182.0,
        -98.0,
        -0.5,
        -0.5,
    ]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1, 2, 3, 4]
    top = [one for part in parts for one in part["top_logprobs"]]
    assert top[0] is None
    assert top[3] == {"c": -0.5, "b": -98.0}
    assert top[4] == {"x": -0.5}


def test_batches_of_an_evaluation_harness_are_answered_for_each_prompt(http: httpx.Client) -> None:
    """Prompts as lists of ids; it looks at the prompt without its first token and the one that was
    generated."""
    prompts = [as_bytes("what is it"), as_bytes("no")]
    fields = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choices = http.post(TEXT, json={"prompt": prompts, **fields}).json()["choices"]
    for ids, choice in zip(prompts, choices, strict=True):
        assert choice["logprobs"]["token_logprobs"][1:-1] == [-float(token) for token in ids[1:]]
        assert all(max(top.values()) == -0.5 for top in choice["logprobs"]["top_logprobs"][1:])


def test_no_token_is_generated_if_only_the_prompt_is_asked_for(http: httpx.Client) -> None:
    for fields in ({"echo": True}, {"echo": True, "logprobs": 0}, {"prompt_logprobs": 1}):
        answer = http.post(TEXT, json={"prompt": "abc", "max_tokens": 0, **fields}).json()
        assert answer["choices"][0]["text"] == ("abc" if "echo" in fields else "")
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "abc", "max_tokens": 0}),
        (TEXT, {"prompt": "abc", "max_tokens": 0, "logprobs": 1}),
        (CHAT, {"messages": HI, "max_tokens": 0}),
        (CHAT, {"messages": HI, "max_tokens": 0, "prompt_logprobs": 1}),
        (CHAT, {"messages": HI, "max_completion_tokens": 0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 0}),
        ("/v1/messages", {"messages": HI, "max_tokens": 0}),
    ],
)
def test_to_generate_nothing_is_refused_elsewhere(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    field = next(name for name in body if name.endswith("_tokens"))
    assert message.startswith((f"{field} is 0; it must be at least 1", f"{field} is 0; 1 or more "))


# vLLM


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [(TEXT, {"prompt": "ab", "n": 2}), (CHAT, {"messages": HI, "input_ids": as_bytes("ab")})],
)
def test_prompt_logprobs_name_rank_and_text_of_each_token(
    http: httpx.Client, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    body = {**prompt, "prompt_logprobs": 1, "max_tokens": 2}
    answers = events(http, path, body) if stream else [http.post(path, json=body).json()]
    holders = (
        answers if path == CHAT else [choice for answer in answers for choice in answer["choices"]]
    )
    told = [holder["prompt_logprobs"] for holder in holders if "prompt_logprobs" in holder]
    expected = [
        None,
        {
            "98": {"logprob": -98.0, "rank": 3, "decoded_token": "b"},
            "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
        },
    ]
    assert told == [expected] * prompt.get("n", 1)

"""What SGLang's and vLLM's chat can tell beside the answer, and templates that a request brings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.fake import HANG_S, RunningServer, as_bytes, running
from tests.text.tokens import byte_backend
from weft.config.server import ServerConfig
from weft.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    lines = http.post(CHAT, json={"messages": HI, "stream": True, **fields}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_the_prompt_is_reported_as_text_and_as_ids_when_asked_for(
    http: httpx.Client, server: RunningServer
) -> None:
    wanted = {"return_prompt_text": True, "return_prompt_token_ids": True}
    answer = http.post(CHAT, json={"messages": HI, **wanted}).json()
    [seen] = server.engine.seen
    assert answer["prompt_text"] == RENDERED
    assert answer["prompt_token_ids"] == np.frombuffer(seen.input_ids, np.int32).tolist()
    assert "token_ids" not in answer["choices"][0]
    first, *others = chunks(http, **wanted)
    assert (first["prompt_text"], first["prompt_token_ids"]) == (
        RENDERED,
        answer["prompt_token_ids"],
    )
    assert not any("prompt_text" in one or "prompt_token_ids" in one for one in others)
    assert (
        not {"prompt_text", "prompt_token_ids"}
        & http.post(CHAT, json={"messages": HI}).json().keys()
    )


def test_the_text_of_a_prompt_that_was_cut_is_what_is_left_of_it(http: httpx.Client) -> None:
    body = {"messages": HI, "return_prompt_text": True, "truncate_prompt_tokens": 4}
    answer = http.post(CHAT, json=body).json()
    assert RENDERED.endswith(answer["prompt_text"])
    assert answer["usage"]["prompt_tokens"] == 4


def test_meta_info_of_a_choice_is_that_of_generate(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes("yes")
    answer = http.post(CHAT, json={"messages": HI, "return_meta_info": True, "n": 2}).json()
    ids = np.frombuffer(server.engine.seen[0].input_ids, np.int32).tolist()
    native = http.post("/generate", json={"input_ids": ids}).json()["meta_info"]
    for choice in answer["choices"]:
        meta = choice["meta_info"]
        assert meta.keys() == native.keys()
        assert [meta[key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")] == [
            native[key] for key in ("finish_reason", "prompt_tokens", "completion_tokens")
        ]
    told = [one["choices"][0].get("meta_info") for one in chunks(http, return_meta_info=True)]
    assert told[:-1] == [None] * (len(told) - 1)
    assert told[-1]["completion_tokens"] == native["completion_tokens"]


def test_tokens_that_are_named_are_reported_behind_the_likeliest(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes("x")
    fields = {"logprob_token_ids": [97, 98], "return_tokens_as_token_ids": True}
    answer = http.post(
        CHAT, json={"messages": HI, "logprobs": True, "top_logprobs": 1, **fields}
    ).json()
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [(one["token"], one["logprob"]) for one in top[1:]] == [
        ("token_id:97", -97.0),
        ("token_id:98", -98.0),
    ]
    answer = http.post(TEXT, json={"prompt": "Hi", "logprobs": 0, **fields}).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert top["token_id:97"] == -97.0
    assert top["token_id:98"] == -98.0
    for path in (CHAT, TEXT):
        refused = http.post(path, json={"messages": HI, "prompt": "Hi", "logprob_token_ids": [97]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_session_id_changes_nothing_but_beside_session_params(
    http: httpx.Client, path: str
) -> None:
    body = {"messages": HI, "prompt": "Hi", "session_id": "agent-7"}
    assert http.post(path, json=body).status_code == 200
    refused = http.post(path, json={**body, "session_params": {"id": "agent-7"}})
    assert refused.status_code == 400
    assert "exclude each other" in refused.json()["error"]["message"]


# Templates of requests


@pytest.fixture(scope="module")
def trusting() -> Iterator[httpx.Client]:
    config = ServerConfig(drain_s=1.0, trust_request_chat_template=True)
    with running(config) as server, httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        yield client


def templated(http: httpx.Client, template: str) -> httpx.Response:
    return http.post(
        CHAT, json={"messages": HI, "chat_template": template, "return_prompt_text": True}
    )


def test_a_template_of_a_request_is_used_where_the_server_trusts_it(trusting: httpx.Client) -> None:
    answer = templated(trusting, "{% for message in messages %}[{{ message.content }}]{% endfor %}")
    assert answer.json()["prompt_text"] == "[Hi]"
    assert (
        trusting.post(CHAT, json={"messages": HI, "return_prompt_text": True}).json()["prompt_text"]
        == RENDERED
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "not valid Jinja"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "not valid Jinja"),
        ("{% for x in [1] %}" * 60 + "{% endfor %}" * 60, "not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("x" * 100_001, "more than 100,000 characters"),
    ],
)
def test_a_bad_template_of_a_request_is_a_400(
    trusting: httpx.Client, template: str, message: str
) -> None:
    answer = templated(trusting, template)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_content_reaches_the_template_in_the_form_in_which_it_reads_it() -> None:
    source = (
        "{% for m in messages %}{% if m.content is none %}<null>{% elif m.content is string %}<{{ m.content }}>"
        "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    config = ServerConfig(drain_s=1.0, tool_call_parser="none")
    tokenizer = Tokenizer(byte_backend(), {}, {"default": source})
    with running(config, tokenizer=tokenizer) as server:
        answer = httpx.post(
            f"{server.url}/apply-template", json={"messages": messages}, timeout=HANG_S
        )
    assert answer.json()["prompt"] == "<a>[b][c]<null><null>"

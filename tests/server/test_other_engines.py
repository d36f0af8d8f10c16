"""What clients and routers that were made for other engines expect of a server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake import CONTEXT, MODEL, RunningServer, running
from tests.server.scripted import HI, TOOLS, ask, say
from weft.config.server import ServerConfig

LOGPROBS: Any = "message.output_text.logprobs"


def test_default_is_the_model_that_is_served(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"model": "default", "prompt": "a", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        body["model"] = "other"
        assert http.post("/v1/completions", json=body).status_code == 404


def test_any_name_of_a_model_is_answered_where_the_operator_says_so() -> None:
    config = ServerConfig(any_model_name=True, drain_s=1.0)
    with running(config) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post(
            "/v1/completions", json={"model": "gpt-4o", "prompt": "a", "max_tokens": 1}
        )
        assert answer.json()["model"] == MODEL
        assert http.get("/v1/models/gpt-4o").json()["id"] == MODEL


def test_max_tokens_beyond_the_context_are_cut_where_the_operator_says_so() -> None:
    with running(clamp_max_tokens=True) as server, httpx.Client(base_url=server.url) as http:
        body: dict[str, Any] = {"prompt": [1] * 1_990, "max_tokens": CONTEXT, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert server.engine.seen[0].sampling.max_new_tokens == 10
        body["prompt"] = [1] * CONTEXT
        assert http.post("/v1/completions", json=body).status_code == 400


def test_models_are_reported_in_the_form_of_anthropic_too(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        listed = http.get("/v1/models").json()
    [model] = listed["data"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
    assert model["type"] == "model"
    assert model["display_name"] == MODEL
    assert model["created_at"].endswith("Z")


def test_loads_tell_numbers_that_are_zero(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        [load] = http.get("/v1/loads").json()["loads"]
    assert load["stats"]["total_retractions"] == 0
    assert load["stats"]["num_running"] == 0


def test_server_info_has_what_routers_of_sglang_read(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        info = http.get("/get_server_info").json()
    assert (info["model_path"], info["disable_radix_cache"]) == (MODEL, False)


def test_reasoning_is_counted_in_both_places(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "<think>\nHm.\n</think>Yes.")
    usage = tool_sdk.chat.completions.create(model=MODEL, messages=HI).usage.model_dump()
    assert usage["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("is_nested", [True, False])
def test_only_allowed_tools_may_be_called(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, is_nested: bool
) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "news"}}]}
    choice = (
        {"type": "allowed_tools", "allowed_tools": allowed}
        if is_nested
        else {"type": "allowed_tools", **allowed}
    )
    say(tool_server, '[{"name": "news", "parameters": {}}]')
    [answer] = ask(tool_sdk, tool_choice=choice).choices
    assert answer.message.tool_calls[0].function.name == "news"
    grammar = tool_server.engine.seen[0].sampling.grammar
    assert "news" in grammar.text
    assert "weather" not in grammar.text


def test_allowed_tools_with_auto_leave_the_choice_to_the_model(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "news"}}]}
    say(tool_server, "No.")
    [answer] = ask(
        tool_sdk, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    ).choices
    assert answer.message.content == "No."
    assert answer.message.tool_calls is None


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "sometimes", "tools": []},
        {"mode": "auto"},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "unknown"}}]},
        {"mode": "required", "tools": []},
        {"mode": "auto", "tools": [7]},
        7,
    ],
)
def test_allowed_tools_that_make_no_sense_are_refused(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, allowed: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_sdk, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert caught.value.param == "tool_choice"


def test_a_response_has_the_log_probabilities_of_its_text(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "<think>\nHm.\n</think>Yes.")
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", top_logprobs=2)
    text = answer.output[-1].content[0]
    assert text.text == "Yes."
    assert [one.token for one in text.logprobs] == list("Yes.")
    assert {len(one.top_logprobs) for one in text.logprobs} == {2}
    events = list(
        tool_sdk.responses.create(model=MODEL, input="Hi", stream=True, include=[LOGPROBS])
    )
    told = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert [one.token for one in told] == list("Yes.")


@pytest.mark.parametrize("stream", [True, False])
def test_the_ollama_routes_tell_log_probabilities(tool_server: RunningServer, stream: bool) -> None:
    say(tool_server, "Yes.")
    body = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 1, "stream": stream}
    with httpx.Client(base_url=tool_server.url) as http:
        answer = http.post("/api/chat", json=body).text
    told = [one for line in answer.splitlines() for one in json.loads(line).get("logprobs", [])]
    assert "".join(one["token"] for one in told).startswith("Yes.")
    assert {len(one["top_logprobs"]) for one in told} == {1}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("fewest", [0, 3])
def test_stop_tokens_beyond_the_vocabulary_have_no_effect(
    server: RunningServer, path: str, fewest: int
) -> None:
    with httpx.Client(base_url=server.url) as http:
        sampling = {"stop_token_ids": [270, 151_643, 2**31 - 1]}
        if path == "/generate":
            params = {**sampling, "min_new_tokens": fewest, "max_new_tokens": 4, "ignore_eos": True}
            body = {"text": "a", "sampling_params": params}
        else:
            body = {
                "prompt": "a",
                **sampling,
                "min_tokens": fewest,
                "max_tokens": 4,
                "ignore_eos": True,
            }
        answer = http.post(path, json=body)
    assert answer.status_code == 200
    assert len(server.engine.seen) == 1

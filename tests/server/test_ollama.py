"""Ollama's API, and the facts about the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import CONTEXT, HANG_S, MODEL, RunningServer, as_bytes, running
from tests.server.scripted import CALL, OSLO, THOUGHT, TOOLS, say
from weft.server.context import ModelFacts

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def http(tool_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=HANG_S) as client:
        yield client


def lines(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_a_line_for_each_piece(http: httpx.Client, tool_server: RunningServer) -> None:
    say(tool_server, THOUGHT)
    found = lines(http.post("/api/chat", json={"model": f"{MODEL}:latest", "messages": HI}))
    assert "".join(line["message"]["content"] for line in found) == "Yes."
    assert "".join(line["message"].get("thinking", "") for line in found) == "It rains.\n"
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    last = found[-1]
    assert (last["done_reason"], last["eval_count"]) == ("stop", len(THOUGHT) + 1)
    assert last["prompt_eval_count"] == len(tool_server.engine.seen[0].input_ids) // 4
    assert last["total_duration"] >= last["eval_duration"] >= 0  # an engine may answer at once


def test_a_chat_may_be_one_object_with_calls(
    http: httpx.Client, tool_server: RunningServer
) -> None:
    say(tool_server, CALL)
    body = {"model": MODEL, "messages": HI, "tools": TOOLS, "stream": False}
    answer = http.post("/api/chat", json=body).json()
    assert answer["message"]["tool_calls"] == [{"function": {"name": "weather", "arguments": OSLO}}]
    found = lines(http.post("/api/chat", json={**body, "stream": True}))
    assert [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]] == [
        answer["message"]["tool_calls"]
    ]


def test_a_broken_call_is_text_also_in_a_stream(
    http: httpx.Client, tool_server: RunningServer
) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>'
    say(tool_server, broken)
    found = lines(http.post("/api/chat", json={"messages": HI, "tools": TOOLS}))
    assert "".join(line["message"]["content"] for line in found) == broken
    assert not any("tool_calls" in line["message"] for line in found)


def test_options_are_sampling_parameters(http: httpx.Client, tool_server: RunningServer) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "seed": 1,
        "stop": ["x"],
        "repeat_penalty": 1.2,
    }
    body = {
        "prompt": "Hi",
        "system": "Be kind.",
        "stream": False,
        "options": {**options, "num_ctx": 9},
    }
    answer = http.post("/api/generate", json=body).json()
    assert answer["response"] == "Hel"
    assert answer["done_reason"] == "length"
    params = tool_server.engine.seen[0].sampling
    assert params.max_new_tokens == 3
    assert params.temperature == 0.5
    assert params.top_k == 7
    assert params.seed == 1
    assert params.stop == ("x",)
    assert params.repetition_penalty == 1.2


def test_a_raw_prompt_is_not_put_into_the_template(
    http: httpx.Client, tool_server: RunningServer
) -> None:
    tool_server.engine.script = lambda ids: ids
    body = {"prompt": "abc", "raw": True, "stream": False}
    assert http.post("/api/generate", json=body).json()["response"] == "abc"


def test_a_format_is_a_constraint(http: httpx.Client, tool_server: RunningServer) -> None:
    for format in ("json", {"type": "object"}):
        http.post("/api/generate", json={"prompt": "x", "format": format, "stream": False})
        assert tool_server.engine.seen[-1].sampling.grammar is not None


def test_an_empty_prompt_asks_for_nothing(http: httpx.Client, tool_server: RunningServer) -> None:
    [line] = lines(http.post("/api/generate", json={"model": MODEL}))
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert not tool_server.engine.seen


def test_the_model_is_described(http: httpx.Client) -> None:
    assert [one["name"] for one in http.get("/api/tags").json()["models"]] == [MODEL]
    assert [one["name"] for one in http.get("/api/ps").json()["models"]] == [MODEL]
    shown = http.post("/api/show", json={"model": MODEL}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # clients refuse older ones


def test_errors_are_one_text(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json={"model": "other", "messages": HI})
    assert answer.status_code == 404
    assert list(answer.json()) == ["error"]
    assert "does not exist" in answer.json()["error"]
    image = {"role": "user", "content": "x", "images": ["aGk="]}
    assert http.post("/api/chat", json={"messages": [image]}).status_code == 400
    nothing = http.post("/api/chat", json={"messages": HI, "options": {"num_predict": 0}})
    assert nothing.status_code == 400
    assert nothing.json()["error"].startswith("num_predict is 0")


def test_the_tokenizer_tells_its_special_tokens(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["bos_token"] == "<bos>"
    assert info["eos_token"] == "<eos>"
    assert info["model_max_length"] == CONTEXT
    assert "im_start" in info["chat_template"]
    assert as_bytes("a") == http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]


def test_the_model_is_described_as_clients_read_it() -> None:
    facts = ModelFacts(
        family="qwen3",
        format="gguf",
        num_parameters=596_049_920,
        quantization="Q4_K_M",
        size_bytes=484_220_320,
        hidden_size=1_024,
        num_layers=28,
    )
    with running(facts=facts) as server:
        [tag] = httpx.get(f"{server.url}/api/tags").json()["models"]
        shown = httpx.post(f"{server.url}/api/show", json={"model": MODEL}).json()
    assert tag["size"] == 484_220_320
    assert tag["details"] == shown["details"]
    assert tag["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": "596.05M",
        "quantization_level": "Q4_K_M",
    }
    info = shown["model_info"]
    assert info["general.architecture"] == "qwen3"
    assert info["general.parameter_count"] == 596_049_920
    assert info["qwen3.context_length"] == CONTEXT
    assert info["qwen3.block_count"] == 28

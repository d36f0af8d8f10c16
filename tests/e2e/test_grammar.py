"""Structured output of a real server with the bundled model: every answer has the form that was
asked for."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from tests.e2e.server import Server, wait_until
from tests.seeds import slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "größe"]}, "maxItems": 3},
        "mail": {
            "anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,5}@[a-z]{2,4}$"}]
        },
    },
    "required": ["name", "age", "tags", "mail"],
    "additionalProperties": False,
}
UNIQUE = {
    "type": "array",
    "items": {"type": "integer", "maximum": 9, "minimum": 0},
    "uniqueItems": True,
    "maxItems": 3,
}


@pytest.fixture(scope="module", params=["on", *slow(["off"])])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server("--overlap", request.param, "--mixed-chunk", request.param)
    yield server
    assert server.stop() == 0


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as http:
        yield http


def chat(http: httpx.Client, **fields: object) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "Tell me of Ann."}],
        "max_tokens": 300,
        **fields,
    }
    return http.post("/v1/chat/completions", json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def test_every_answer_parses_while_others_write_freely(http: httpx.Client) -> None:
    asked: list[dict[str, Any]] = []
    for seed in range(3):
        asked += [
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": PERSON},
                },
                "seed": seed,
            },
            {
                "structured_outputs": {"regex": "[0-9]{3}-[a-f]{2,4}"},
                "seed": seed,
                "logprobs": True,
                "top_logprobs": 3,
            },
            {
                "structured_outputs": {"choice": ["yes", "no", "größe"]},
                "seed": seed,
                "ignore_eos": True,
            },
            {"ebnf": 'root ::= "<" [a-z] [a-z] ">"', "temperature": 0, "frequency_penalty": 1},
            {"max_tokens": 30, "seed": seed, "ignore_eos": True},
        ]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda fields: chat(http, **fields), asked))
    for fields, answer in zip(asked, answers, strict=True):
        if "response_format" in fields:
            jsonschema.validate(json.loads(text(answer)), PERSON)
        elif "ebnf" in fields:
            assert re.fullmatch("<[a-z]{2}>", text(answer))
        elif fields.get("structured_outputs", {}).get("regex"):
            assert re.fullmatch("[0-9]{3}-[a-f]{2,4}", text(answer))
        elif "structured_outputs" in fields:
            assert text(answer) in ("yes", "no", "größe")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 30


def test_n_answers_of_one_prompt_and_a_stream_have_the_form_too(http: httpx.Client) -> None:
    form = {"structured_outputs": {"json": PERSON}}
    answer = chat(http, n=4, **form)
    contents = {choice["message"]["content"] for choice in answer.json()["choices"]}
    for content in contents:
        jsonschema.validate(json.loads(content), PERSON)
    assert len(contents) > 1
    lines = chat(http, stream=True, **form).text.split("\n\n")
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    jsonschema.validate(json.loads("".join(pieces)), PERSON)


def test_forced_calls_have_valid_arguments_also_in_a_stream(http: httpx.Client) -> None:
    size = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
    person = {"name": "person", "parameters": PERSON, "strict": True}
    tools = [
        {"type": "function", "function": person},
        {
            "type": "function",
            "function": {"name": "size", "parameters": size | {"additionalProperties": False}},
        },
    ]
    asked: dict[str, Any] = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 3,
    }
    [choice] = chat(http, **asked).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    schemas = {"person": PERSON, "size": size}
    jsonschema.validate(
        json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]]
    )
    lines = chat(http, stream=True, **asked).text.split("\n\n")
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    pieces = [
        one["function"]
        for chunk in chunks
        for one in chunk["choices"][0]["delta"].get("tool_calls") or []
    ]
    assert "".join(piece.get("name") or "" for piece in pieces) == call["function"]["name"]
    assert (
        "".join(piece.get("arguments") or "" for piece in pieces) == call["function"]["arguments"]
    )


def test_max_tokens_cuts_with_reason_length(http: httpx.Client) -> None:
    [choice] = chat(http, structured_outputs={"regex": "[a-z]{50}"}, max_tokens=3).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("[a-z]+", choice["message"]["content"])


def test_invalid_grammars_are_refused_and_relaxed_ones_told(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = chat(http, structured_outputs={"regex": "(a"}, stream=stream)
        assert answer.status_code == 400
        assert "unclosed group" in answer.json()["error"]["message"]
    answer = chat(http, structured_outputs={"json": UNIQUE})
    assert isinstance(json.loads(text(answer)), list)
    assert "uniqueItems" in answer.headers["x-weft-warnings"]
    answer = chat(http, structured_outputs={"json": UNIQUE, "strict": True})
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]


NO_AUTOMATON = {"type": "string", "maxLength": 4, "pattern": "^(?!x)\\b.*$"}
ID = 1180334356853624923  # no double
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60}


def holding(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def in_every_api(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """(path, body) by the field that has the schema."""
    function = {"name": "f", "parameters": schema}
    plain = {"name": "g", "parameters": holding({"type": "integer"})}
    tools = [{"type": "function", "function": one} for one in (function, plain)]
    format = {"type": "json_schema", "name": "n", "schema": schema}
    use = {"name": "f", "input_schema": schema}
    chat = "/v1/chat/completions"
    return {
        "response_format": (
            chat,
            {"response_format": {"type": "json_schema", "json_schema": format}},
        ),
        "structured_outputs": (chat, {"structured_outputs": {"json": schema}}),
        "required": (chat, {"tools": tools, "tool_choice": "required"}),
        "responses": ("/v1/responses", {"input": "Hi", "text": {"format": format}}),
        "anthropic": (
            "/v1/messages",
            {"tools": [use], "tool_choice": {"type": "tool", "name": "f"}},
        ),
        "ollama": ("/api/chat", {"format": schema, "stream": False}),
    }


def sent(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    if path == "/v1/responses":
        return http.post(path, json={"max_output_tokens": 60, **body})
    return http.post(path, json={**ASKED, **body})


@pytest.mark.parametrize("schema", [NO_AUTOMATON, {"anyOf": [NO_AUTOMATON, {"type": "null"}]}])
def test_a_pattern_without_an_automaton_is_reported_in_every_api(
    http: httpx.Client, schema: dict[str, Any]
) -> None:
    for field, (path, body) in in_every_api(holding(schema)).items():
        answer = sent(http, path, body)
        assert answer.status_code == 200, (field, answer.text)
        assert "pattern" in answer.headers["x-weft-warnings"], field


def test_a_pattern_without_an_automaton_is_refused_if_strict(http: httpx.Client) -> None:
    for schema in (holding(NO_AUTOMATON), holding({"enum": [ID]})):
        format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        strict = [
            (
                "/v1/chat/completions",
                {"response_format": {"type": "json_schema", "json_schema": format}},
            ),
            ("/v1/chat/completions", {"structured_outputs": {"json": schema, "strict": True}}),
            ("/v1/responses", {"input": "Hi", "text": {"format": format}}),
        ]
        for path, body in strict:
            answer = sent(http, path, body)
            assert answer.status_code == 400, answer.text
            assert "strict is set" in answer.json()["error"]["message"]


def test_a_number_that_is_no_double_is_the_literal_or_is_reported(http: httpx.Client) -> None:
    assert text(chat(http, structured_outputs={"json": {"enum": [ID]}, "strict": True})) == str(ID)
    answer = http.post("/api/chat", json={**ASKED, "format": {"const": ID}, "stream": False})
    assert answer.json()["message"]["content"] == str(ID)
    for field, (path, body) in in_every_api(holding({"enum": [ID]})).items():
        answer = sent(http, path, body)
        assert answer.status_code == 200, (field, answer.text)
        assert str(ID) in answer.headers["x-weft-warnings"], field


def work_s(process: psutil.Process) -> dict[int, float]:
    """Seconds of a processor that each of its children has taken, by their numbers."""
    return {one.pid: float(one.cpu_times().user) for one in process.children()}


def test_a_bomb_is_refused_while_others_answer(http: httpx.Client, server: Server) -> None:
    rules = "start: " + " | ".join(
        json.dumps(f"value_{i}") for i in range(60_000)
    )  # ten seconds of a processor
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(chat, http, structured_outputs={"grammar": rules})
        assert wait_until(lambda: server.get("/requests")["queue"]["grammar_queue_size"] == 1)
        [row] = server.get("/requests")["requests"]
        assert row["state"] == "grammar"
        assert row["why"] == "its grammar is being compiled"
        assert text(chat(http, structured_outputs={"choice": ["other"]})) == "other"
        before = work_s(server.engine)

        def busy() -> list[int]:
            now = work_s(server.engine).items()
            return [pid for pid, s in now if s > before.get(pid, 0.0) + 0.3]

        assert wait_until(lambda: bool(busy()))
        psutil.Process(busy()[0]).kill()  # as if it had taken all memory
        answer = bomb.result()
    assert answer.status_code == 400
    assert "memory" in answer.json()["error"]["message"]
    assert text(chat(http, structured_outputs={"choice": ["the next"]})) == "the next"

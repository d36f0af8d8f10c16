"""Small routes that clients of other servers know: parsers, counting, and other names for what is
there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, as_bytes, eventually, running
from tests.server.scripted import CALL, THOUGHT, TOOLS
from weft.config.server import ServerConfig

HI = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture
def parsing(tool_server: RunningServer) -> Iterator[httpx.Client]:
    """A server that knows how its model writes calls and reasoning."""
    with httpx.Client(base_url=tool_server.url, timeout=HANG_S) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "Hi", "instructions": "Be kind."}),
    ],
)
def test_the_length_of_a_prompt_is_reported_as_it_will_be_counted(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    usage = http.post(path, json=body).json()["usage"]
    counted = http.post(f"{path}/input_tokens", json=body).json()
    assert counted["input_tokens"] == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert http.post(f"{path}/input_tokens", json={**body, "model": "other"}).status_code == 404


def test_a_template_is_applied_without_generating(
    http: httpx.Client, server: RunningServer
) -> None:
    prompt = http.post("/apply-template", json={"messages": HI}).json()["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert ids == http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    assert http.post("/apply-template", json={"messages": []}).status_code == 400
    assert server.engine.seen == []


@pytest.mark.parametrize("parser", [None, "auto", "hermes"])
def test_calls_are_found_in_a_text(parsing: httpx.Client, parser: str | None) -> None:
    body = {"text": f"Well.{CALL}", "tools": TOOLS, "tool_call_parser": parser}
    assert parsing.post("/parse_function_call", json=body).json() == {
        "normal_text": "Well.",
        "calls": [{"tool_index": 0, "name": "weather", "parameters": '{"city": "Oslo"}'}],
    }
    other = {**body, "text": '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'}
    assert parsing.post("/parse_function_call", json=other).json() == {
        "normal_text": other["text"],
        "calls": [],
    }


@pytest.mark.parametrize("parser", [None, "qwen3"])
def test_reasoning_is_found_in_a_text(parsing: httpx.Client, parser: str | None) -> None:
    body = {"text": THOUGHT, "reasoning_parser": parser}
    assert parsing.post("/separate_reasoning", json=body).json() == {
        "reasoning_text": "It rains.\n",
        "text": "Yes.",
    }


def test_a_long_text_is_parsed_beside_the_event_loop(parsing: httpx.Client) -> None:
    text = "[" * 20_000 + CALL
    found = parsing.post("/parse_function_call", json={"text": text, "tools": TOOLS}).json()
    assert len(found["normal_text"]) == 20_000
    assert len(found["calls"]) == 1


@pytest.mark.parametrize(
    ("kind", "name"), [("tool_call", "gpt"), ("reasoning", "gpt"), ("reasoning", None)]
)
def test_a_parser_that_is_not_there_is_refused_with_those_that_are(
    http: httpx.Client, kind: str, name: str | None
) -> None:
    path = {"tool_call": "/parse_function_call", "reasoning": "/separate_reasoning"}[kind]
    answer = http.post(path, json={"text": "a", "tools": TOOLS, f"{kind}_parser": name})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"{kind}_parser")
    assert {"tool_call": "hermes", "reasoning": "qwen3"}[kind] in error["message"]


def test_invocations_are_completions_by_their_fields(
    http: httpx.Client, server: RunningServer
) -> None:
    server.engine.script = lambda ids: as_bytes("ab")
    chat = http.post("/invocations", json={"messages": HI, "model": MODEL})
    assert chat.json()["choices"][0]["message"]["content"] == "ab"
    text = http.post("/invocations", json={"messages": None, "prompt": "x"})
    assert text.json()["choices"][0]["text"] == "ab"
    assert http.post("/invocations", json={"prompt": "x", "stream": True}).text.endswith(
        "data: [DONE]\n\n"
    )
    for content in (b"{}", b"[]", b"{", b"\xff"):
        answer = http.post("/invocations", content=content)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.post(
        "/invocations", content=b"{}", headers={"content-type": "text/plain"}
    ).status_code in (400, 415)
    assert (
        http.post("/invocations", json={"prompt": "x", "temperature": 9}).json()["error"]["param"]
        == "temperature"
    )


def test_an_invocation_whose_client_leaves_is_aborted(server: RunningServer) -> None:
    server.engine.hold = True
    server.leave("/invocations", {"messages": HI})
    assert eventually(lambda: len(server.engine.aborted) == 1)


def test_vllms_names_for_load_abort_and_flush(http: httpx.Client, server: RunningServer) -> None:
    server.engine.hold = True
    body = {"prompt": ["x", "y"], "rid": "both"}
    with httpx.Client(base_url=server.url, timeout=HANG_S) as other:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(other.post("/v1/completions", json=body))
        )
        thread.start()
        assert eventually(lambda: len(server.engine.running) == 2)
        assert http.get("/load").json() == {"server_load": 2}
        assert http.post("/abort_requests", json={"request_ids": ["none"]}).json() == {"aborted": 0}
        assert http.post("/abort_requests", json={"request_ids": ["both"]}).json() == {"aborted": 2}
        thread.join(HANG_S)
    assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == [
        "abort",
        "abort",
    ]
    assert http.post("/abort_requests", json={}).json() == {"aborted": 0}
    assert http.post("/reset_prefix_cache").status_code == 200


def test_all_routes_are_reported_on_a_page_that_loads_nothing(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "/v1/chat/completions" in page.text
    assert "src=" not in page.text


def test_the_client_of_azure_finds_its_paths(server: RunningServer) -> None:
    with openai.AzureOpenAI(
        azure_endpoint=server.url, api_key="none", api_version="2024-10-21", max_retries=0
    ) as azure:
        answer = azure.chat.completions.create(model=MODEL, messages=HI)
        chunks = list(azure.chat.completions.create(model=MODEL, messages=HI, stream=True))
        text = azure.completions.create(model=MODEL, prompt="Hi").choices[0].text
        with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
            azure.chat.completions.create(model="other", messages=HI)
    assert answer.choices[0].message.content == "Hello, wörld! 🎉"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert text.startswith("Hello")


def test_a_deployment_is_the_model_of_a_body_without_one(http: httpx.Client) -> None:
    for name, status in ((MODEL, 200), ("other", 404)):
        path = f"/openai/deployments/{name}/chat/completions?api-version=2024-10-21"
        assert http.post(path, json={"messages": HI}).status_code == status
        assert http.post(path, json={"messages": HI, "model": MODEL}).status_code == 200
    wrong = http.post(f"/openai/deployments/{MODEL}/completions", content=b"{", headers=JSON)
    assert (wrong.status_code, "not valid JSON" in wrong.text) == (400, True)


def test_azures_current_paths_are_openais(http: httpx.Client) -> None:
    body = {"messages": HI, "prompt": "Hi"}
    for path in ("chat/completions", "completions"):
        assert http.post(f"/openai/v1/{path}", json=body).status_code == 200
    assert http.post("/openai/v1/responses", json={"input": "Hi"}).status_code == 200
    assert http.get("/openai/v1/models").json()["data"][0]["id"] == MODEL


def test_azures_header_has_the_key() -> None:
    with running(ServerConfig(drain_s=1.0, api_key="secret")) as server:
        for key, status in (("secret", 200), ("wrong", 401)):
            answer = httpx.get(f"{server.url}/v1/models", headers={"api-key": key})
            assert answer.status_code == status

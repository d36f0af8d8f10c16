"""Clients of other projects against a running server. Each test is skipped where its client is not
installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.fake import MODEL, RunningServer
from tests.server.scripted import CALL, OSLO, THOUGHT, TOOLS, say

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
HI = [{"role": "user", "content": "Hi"}]


def test_langchain_streams_and_calls_tools(tool_server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0
    )
    say(tool_server, "Hello")
    assert "".join(chunk.content for chunk in model.stream("Hi")) == "Hello"
    say(tool_server, CALL)
    [call] = model.bind_tools(TOOLS).invoke("Hi").tool_calls
    assert call["name"] == "weather"
    assert call["args"] == OSLO
    chunks = list(model.bind_tools(TOOLS).stream("Hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.tool_calls[0]["args"] == OSLO


def test_litellm_speaks_both_openai_and_anthropic(
    tool_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    say(tool_server, THOUGHT)
    for provider, base in (("openai", f"{tool_server.url}/v1"), ("anthropic", tool_server.url)):
        options: dict[str, Any] = {
            "model": f"{provider}/{MODEL}",
            "api_base": base,
            "api_key": "none",
            "messages": HI,
        }
        message = litellm.completion(**options, max_tokens=500).choices[0].message
        assert message.content == "Yes."
        assert message.reasoning_content.strip() == "It rains."
        pieces = litellm.completion(**options, max_tokens=500, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == "Yes."
    say(tool_server, CALL)
    [call] = (
        litellm.completion(**options, max_tokens=500, tools=TOOLS).choices[0].message.tool_calls
    )
    assert json.loads(call.function.arguments) == OSLO


def test_instructor_gets_an_object(tool_server: RunningServer) -> None:
    instructor = pytest.importorskip("instructor")
    import openai
    from pydantic import BaseModel

    class weather(BaseModel):
        city: str

    say(tool_server, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as sdk:
        client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
        found = client.chat.completions.create(
            model=MODEL, messages=HI, response_model=weather, max_retries=0
        )
    assert found.city == "Oslo"


def test_the_ollama_client_chats(tool_server: RunningServer) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=tool_server.url)
    say(tool_server, THOUGHT)
    answer = client.chat(model=MODEL, messages=HI)
    assert answer.message.content == "Yes."
    assert answer.message.thinking == "It rains.\n"
    assert (
        "".join(part.message.content for part in client.chat(model=MODEL, messages=HI, stream=True))
        == "Yes."
    )
    say(tool_server, CALL)
    [call] = client.chat(model=MODEL, messages=HI, tools=TOOLS).message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments == OSLO
    assert [one.model for one in client.list().models] == [MODEL]
    assert "tools" in client.show(MODEL).capabilities

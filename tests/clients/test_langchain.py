"""LangChain's OpenAI models against a real server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.shared import HI, KEY, MODEL, OSLO, TOOLS, WEATHER_CALL, Api

langchain_openai = pytest.importorskip("langchain_openai")
STORY = HI[0]["content"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs


class Answer(BaseModel):
    """What the weather is like."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    warm: bool


def model(api: Api, **options: Any) -> Any:
    common = {
        "model": MODEL,
        "base_url": api.v1,
        "api_key": KEY,
        "max_retries": 0,
        "max_tokens": 300,
        "temperature": 0,
    }
    return langchain_openai.ChatOpenAI(**{**common, **options})


def test_a_model_is_invoked_streamed_and_batched(api: Api) -> None:
    llm = model(api, temperature=0, max_tokens=12, stream_usage=True)
    whole = llm.invoke(STORY)
    chunks = list(llm.stream(STORY))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert any(chunk.usage_metadata for chunk in chunks)
    assert whole.usage_metadata["output_tokens"] == 12
    assert [answer.content for answer in llm.batch([STORY] * 3)] == [whole.content] * 3
    assert asyncio.run(llm.ainvoke(STORY)).content == whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object(api: Api, method: str) -> None:
    assert isinstance(
        model(api).with_structured_output(Answer, method=method).invoke("Oslo?"), Answer
    )


def test_tools_are_called_whole_and_in_pieces(api: Api) -> None:
    forced = model(api).bind_tools(TOOLS[:1], tool_choice="any")
    [call] = forced.invoke("Oslo?").tool_calls
    assert call["name"] == "weather"
    written = model(api, extra_body={"guided_choice": [WEATHER_CALL]}).bind_tools(TOOLS)
    assert [(one["name"], one["args"]) for one in written.invoke("Oslo?").tool_calls] == [
        ("weather", OSLO)
    ]
    pieces = list(written.stream("Oslo?"))
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert total.tool_calls[0]["args"] == OSLO


def test_it_speaks_the_responses_api_as_well(api: Api) -> None:
    llm = model(api, use_responses_api=True, max_tokens=16)
    assert llm.invoke(STORY).content
    assert "".join(str(chunk.text) for chunk in llm.stream(STORY))

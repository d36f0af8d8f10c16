"""Anthropic's SDK against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.shared import CITY_SCHEMA, HI, KEY, MODEL, NUM_PARALLEL, Api

TOOLS: list[Any] = [{"name": "weather", "description": "of a city", "input_schema": CITY_SCHEMA}]
FORCED: Any = {"type": "tool", "name": "weather"}


@pytest.fixture
def sdk(api: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.url, api_key=KEY, max_retries=0, timeout=240) as client:
        yield client


def ask(sdk: anthropic.Anthropic, **options: Any) -> Any:
    return sdk.messages.create(**{"model": MODEL, "max_tokens": 16, "messages": HI, **options})


def test_a_stream_is_the_text_of_a_whole_message(sdk: anthropic.Anthropic) -> None:
    greedy: Any = {"extra_body": {"temperature": 0}, "system": "Be kind."}
    whole = ask(sdk, **greedy)
    with sdk.messages.stream(model=MODEL, max_tokens=16, messages=HI, **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 16
    assert final.usage.cache_read_input_tokens > 0
    counted = sdk.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_events_come_in_the_order_that_is_documented(sdk: anthropic.Anthropic) -> None:
    kinds = [event.type for event in ask(sdk, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("choice", [FORCED, {"type": "any", "disable_parallel_tool_use": True}])
def test_forced_tools_are_used_and_their_results_taken(
    sdk: anthropic.Anthropic, choice: Any
) -> None:
    answer = ask(sdk, tools=TOOLS, tool_choice=choice, max_tokens=200)
    [use] = answer.content
    assert answer.stop_reason == "tool_use"
    assert use.type == "tool_use"
    assert use.name == "weather"
    assert use.input["city"] in ("Oslo", "Rome")
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "wet"}],
    }
    history = [*HI, {"role": "assistant", "content": answer.content}, result]
    assert ask(sdk, messages=history, tools=TOOLS, tool_choice={"type": "none"}).stop_reason
    with sdk.messages.stream(
        model=MODEL, max_tokens=200, messages=HI, tools=TOOLS, tool_choice=choice
    ) as stream:
        pieces = [
            event.delta.partial_json for event in stream if event.type == "content_block_delta"
        ]
        [streamed] = stream.get_final_message().content
    assert json.loads("".join(pieces)) == streamed.input


def test_stop_sequences_and_thinking_are_taken(sdk: anthropic.Anthropic) -> None:
    greedy: Any = {"extra_body": {"temperature": 0}}
    text = ask(sdk, **greedy).content[0].text
    stopped = ask(sdk, stop_sequences=[text[8:11]], **greedy)
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == text[8:11]
    thinking: Any = {"type": "enabled", "budget_tokens": 1_024}
    assert ask(sdk, thinking=thinking).usage.output_tokens == 16


def test_mistakes_have_the_exceptions_of_the_sdk(api: Api, sdk: anthropic.Anthropic) -> None:
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=api.url, api_key="no", max_retries=0) as other,
    ):
        ask(other)
    with pytest.raises(anthropic.NotFoundError):
        ask(sdk, model="claude")
    # The two texts that Claude Code reads: it asks for fewer tokens, or compacts the conversation.
    excess = r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > \d+"
    with pytest.raises(anthropic.BadRequestError, match=excess):
        ask(sdk, max_tokens=5_000)
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"
    ):
        ask(sdk, messages=[{"role": "user", "content": "Hello there. " * 3_000}])
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]"):
        ask(sdk, messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}])


def test_a_client_that_leaves_frees_everything(api: Api, sdk: anthropic.Anthropic) -> None:
    with sdk.messages.stream(model=MODEL, max_tokens=1_500, messages=HI) as stream:
        next(iter(stream))
    assert api.becomes_idle()


def test_many_clients_at_once_are_all_answered(api: Api) -> None:
    async def all_of_them() -> list[Any]:
        async with anthropic.AsyncAnthropic(
            base_url=api.url, api_key=KEY, max_retries=3, timeout=240
        ) as client:
            calls = [
                client.messages.create(model=MODEL, max_tokens=4, messages=HI)
                for _ in range(NUM_PARALLEL)
            ]
            return await asyncio.gather(*calls)

    assert [answer.usage.output_tokens for answer in asyncio.run(all_of_them())] == [
        4
    ] * NUM_PARALLEL
    assert api.becomes_idle()

"""OpenAI's SDK against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.shared import (
    HI,
    KEY,
    MODEL,
    NUM_PARALLEL,
    OSLO,
    TOOLS,
    TWO_CALLS,
    WEATHER_CALL,
    Api,
)

Sdk = openai.OpenAI


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    warm: bool


@pytest.fixture
def sdk(api: Api) -> Iterator[Sdk]:
    with openai.OpenAI(base_url=api.v1, api_key=KEY, max_retries=0, timeout=240) as client:
        yield client


def ask(sdk: Sdk, **options: Any) -> Any:
    return sdk.chat.completions.create(
        **{"model": MODEL, "messages": HI, "max_tokens": 24, "temperature": 0, **options}
    )


def test_a_stream_is_the_text_of_a_whole_answer(sdk: Sdk) -> None:
    whole = ask(sdk)
    chunks = list(ask(sdk, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert (
        [c.choices[0].finish_reason for c in chunks if c.choices][-1]
        == whole.choices[0].finish_reason
        == "length"
    )


def test_text_completions_of_every_form_of_prompt(sdk: Sdk) -> None:
    answer = sdk.completions.create(
        model=MODEL, prompt=["Once", "Then"], max_tokens=4, n=2, echo=True, temperature=0
    )
    assert [choice.text[:4] for choice in answer.choices] == ["Once", "Once", "Then", "Then"]
    ids = sdk.completions.create(model=MODEL, prompt=[[101, 102]], max_tokens=4, stream=True)
    assert sum(len(chunk.choices) for chunk in ids) >= 1


def test_several_choices_log_probabilities_and_stop_strings(sdk: Sdk) -> None:
    answer = ask(sdk, n=3, temperature=1, seed=1, logprobs=True, top_logprobs=3)
    assert len({choice.message.content for choice in answer.choices}) == 3
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 24
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    text = ask(sdk).choices[0].message.content
    stopped = ask(sdk, stop=[text[10:14]])
    assert stopped.choices[0].message.content == text[: text.index(text[10:14])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_keep_to_their_schemas(sdk: Sdk, choice: Any, stream: bool) -> None:
    options = {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    if stream:
        with sdk.chat.completions.stream(model=MODEL, messages=HI, **options) as events:
            [found] = events.get_final_completion().choices
    else:
        [found] = ask(sdk, **options).choices
    [call] = found.message.tool_calls
    assert found.finish_reason == "tool_calls"
    known = {"weather": [{"city": "Oslo"}, {"city": "Rome"}], "news": [{}]}
    assert json.loads(call.function.arguments) in known[call.function.name]
    assert choice == "required" or call.function.name == "weather"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_writes_are_found(sdk: Sdk, stream: bool) -> None:
    options = {"tools": TOOLS, "max_tokens": 200, "extra_body": {"guided_choice": [TWO_CALLS]}}
    if stream:
        calls: dict[int, list[str]] = {}
        for chunk in ask(sdk, stream=True, **options):
            for delta in chunk.choices[0].delta.tool_calls or ():
                calls.setdefault(delta.index, []).append(
                    (delta.function.name or "") + (delta.function.arguments or "")
                )
        assert ["".join(pieces) for pieces in calls.values()] == [
            'weather{"city": "Oslo"}',
            "news{}",
        ]
        return
    [choice] = ask(sdk, **options).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "news"]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "wet"}
        for call in choice.message.tool_calls
    ]
    history = [*HI, choice.message, *results]
    assert (
        ask(sdk, messages=history, tools=TOOLS, max_tokens=2).choices[0].message.role == "assistant"
    )
    [choice] = ask(sdk, parallel_tool_calls=False, **options).choices
    assert len(choice.message.tool_calls) == 1


def test_a_pydantic_model_is_a_constraint(sdk: Sdk) -> None:
    parsed = sdk.chat.completions.parse(
        model=MODEL, messages=HI, response_format=Answer, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    tool = openai.pydantic_function_tool(Answer, name="answer")
    forced = sdk.chat.completions.parse(
        model=MODEL,
        messages=HI,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    assert isinstance(forced.choices[0].message.tool_calls[0].function.parsed_arguments, Answer)
    assert isinstance(
        sdk.responses.parse(model=MODEL, input="Hi", text_format=Answer).output_parsed, Answer
    )
    text = ask(sdk, response_format={"type": "json_object"}).choices[0].message.content
    assert text.lstrip().startswith("{")


def test_mistakes_have_the_exceptions_of_the_sdk(api: Api, sdk: Sdk) -> None:
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=api.v1, api_key="no", max_retries=0) as other,
    ):
        other.models.list()
    with pytest.raises(openai.NotFoundError) as missing:
        ask(sdk, model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(sdk, temperature=9)
    assert wrong.value.param == "temperature"
    for options in (
        {"max_tokens": 5_000},
        {"messages": [{"role": "user", "content": "word " * 5_000}]},
    ):
        with pytest.raises(
            openai.BadRequestError, match="this model's maximum context length is"
        ) as long:
            ask(sdk, **options)
        assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="grammar is invalid"):
        ask(
            sdk,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        )


def test_a_client_that_loses_patience_or_leaves_frees_everything(api: Api, sdk: Sdk) -> None:
    endless = {"max_tokens": 1_500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        ask(sdk.with_options(timeout=0.05), n=8, **endless)
    assert api.becomes_idle()
    with ask(sdk, stream=True, n=2, **endless) as stream:
        next(iter(stream))
    assert api.becomes_idle()


def test_many_clients_at_once_all_get_their_own_answer(api: Api) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        text = f"number {number}"
        options: Any = {"model": MODEL, "messages": HI, "extra_body": {"guided_choice": [text]}}
        if number % 2:
            answer = await client.chat.completions.create(**options)
            return str(answer.choices[0].message.content)
        stream = await client.chat.completions.create(stream=True, **options)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=api.v1, api_key=KEY, max_retries=3, timeout=240
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(NUM_PARALLEL)))

    assert asyncio.run(all_of_them()) == [f"number {number}" for number in range(NUM_PARALLEL)]
    assert api.becomes_idle()


def test_responses_are_created_continued_counted_and_forgotten(sdk: Sdk) -> None:
    first = sdk.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", max_output_tokens=8
    )
    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    assert sdk.responses.retrieve(first.id).output_text == first.output_text
    second = sdk.responses.create(
        model=MODEL, input="More", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    count = sdk.responses.input_tokens.count(
        model=MODEL, input="More", previous_response_id=first.id
    )
    assert count.input_tokens == second.usage.input_tokens
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)


def test_a_response_streams_events_and_calls_tools(sdk: Sdk) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    forced: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    with sdk.responses.stream(model=MODEL, input="Hi", **forced) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_response().output
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    own: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    assert sdk.responses.create(
        model=MODEL, input=own, tools=tools, tool_choice="none", max_output_tokens=4
    ).usage


def test_a_background_response_is_cancelled(api: Api, sdk: Sdk) -> None:
    options: Any = {"max_output_tokens": 1_500, "extra_body": {"ignore_eos": True}}
    begun = sdk.responses.create(model=MODEL, input="Hi", background=True, **options)
    assert begun.status == "queued"
    assert sdk.responses.cancel(begun.id).status == "cancelled"
    assert api.becomes_idle()


def test_models_are_listed_and_found(sdk: Sdk) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_a_call_may_be_parsed_apart_from_its_generation(sdk: Sdk) -> None:
    found = sdk.post(
        "/../parse_function_call", cast_to=object, body={"text": WEATHER_CALL, "tools": TOOLS}
    )
    assert found["calls"][0]["name"] == "weather"
    assert json.loads(found["calls"][0]["parameters"]) == OSLO

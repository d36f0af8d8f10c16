"""Tools on a model whose chat template knows no calls, in every API: prompt, answer, and the next
prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, running
from tests.server.scripted import HI, OSLO, TOOLS, WEATHER, ask, record_prompts, say
from weft.config.server import ServerConfig
from weft.text.templates.tools_in_messages import described

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NEWS = '<tool_call>\n{"name": "news", "arguments": {}}\n</tool_call>'
WELL = f"<answer>Well.\n{CALL}"
ANTHROPIC_TOOLS: Any = [{"name": "weather", "description": "", "input_schema": WEATHER}]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER}]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running(ServerConfig(drain_s=1.0)) as server:
        yield server


@pytest.fixture
def plain(shared: RunningServer) -> RunningServer:
    """A server whose template writes roles and texts alone, with a fresh fake engine."""
    shared.reset()
    return shared


@pytest.fixture
def sdk(plain: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{plain.url}/v1", api_key="none", max_retries=0, timeout=HANG_S
    ) as client:
        yield client


def format_of(server: RunningServer) -> dict[str, Any]:
    """The structural tag of the last request."""
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    found: dict[str, Any] = json.loads(grammar.text)["format"]
    return found


def begins_of(format: dict[str, Any]) -> list[str]:
    return [tag["begin"].split('"')[3] for tag in format["tags"]]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_go_on_behind_a_call(
    sdk: openai.OpenAI, plain: RunningServer, stream: bool
) -> None:
    prompts = record_prompts(plain, WELL)
    if stream:
        with sdk.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as events:
            [choice] = events.get_final_completion().choices
    else:
        [choice] = ask(sdk).choices
    assert choice.message.content == "Well.\n"
    [call] = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == OSLO
    assert choice.finish_reason == "tool_calls"
    assert described(TOOLS) in prompts[0]
    turn = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    for one in turn["tool_calls"]:
        one["function"].pop("parsed_arguments", None)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    ask(sdk, messages=[*HI, turn, result])
    assert prompts[1].startswith(prompts[0] + WELL)
    assert "user\n<tool_response>\nrain\n</tool_response>" in prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_words_has_no_mark(
    sdk: openai.OpenAI, plain: RunningServer, stream: bool
) -> None:
    prompts = record_prompts(plain, '<answer>{"name": "weather", "arguments": {}} is a call.')
    answer = ask(sdk, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text == '{"name": "weather", "arguments": {}} is a call.'
    ask(sdk, messages=[*HI, {"role": "assistant", "content": text}, *HI])
    assert prompts[1].startswith(f"{prompts[0]}<answer>{text}")


def test_responses_go_on_behind_a_call(sdk: openai.OpenAI, plain: RunningServer) -> None:
    prompts = record_prompts(plain, CALL)
    first = sdk.responses.create(input="Hi", tools=RESPONSE_TOOLS)
    [item] = first.output
    assert item.type == "function_call"
    assert item.name == "weather"
    assert json.loads(item.arguments) == OSLO
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
    sdk.responses.create(input=[result], tools=RESPONSE_TOOLS, previous_response_id=first.id)
    given: Any = [{"role": "user", "content": "Hi"}, item.model_dump(), result]
    sdk.responses.create(input=given, tools=RESPONSE_TOOLS)
    assert prompts[1].startswith(prompts[0] + CALL)
    assert prompts[2] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_go_on_behind_a_call(plain: RunningServer, stream: bool) -> None:
    prompts = record_prompts(plain, WELL)
    given: Any = {"model": MODEL, "max_tokens": 200, "tools": ANTHROPIC_TOOLS}
    with anthropic.Anthropic(base_url=plain.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(messages=HI, **given) as events:  # type: ignore[arg-type]
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=HI, **given)
        text, use = answer.content
        assert text.type == "text"
        assert text.text == "Well.\n"
        assert use.type == "tool_use"
        assert use.input == OSLO
        assert answer.stop_reason == "tool_use"
        turn: Any = {"role": "assistant", "content": answer.content}
        block: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
        client.messages.create(
            messages=[
                *HI,
                turn,
                {"role": "user", "content": [block, {"type": "text", "text": "So?"}]},
            ],  # type: ignore[list-item]
            **given,
        )
    assert "<tool_response>\nrain\n</tool_response>\nSo?" in prompts[1]
    assert prompts[1].startswith(prompts[0])


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_chat_goes_on_behind_a_call(plain: RunningServer, stream: bool) -> None:
    prompts = record_prompts(plain, CALL)
    body = {"model": MODEL, "messages": HI, "tools": TOOLS, "stream": stream}
    answer = httpx.post(f"{plain.url}/api/chat", json=body, timeout=HANG_S)
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    [call] = [one for line in lines for one in line["message"].get("tool_calls", ())]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"] == OSLO
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    body["messages"] = [*HI, turn, result]
    assert httpx.post(f"{plain.url}/api/chat", json=body, timeout=HANG_S).status_code == 200
    # Ollama's arguments are an object, so the white space in them is the server's.
    assert prompts[1].startswith(prompts[0] + '<tool_call>\n{"name": "weather", "arguments": ')
    show = httpx.post(f"{plain.url}/api/show", json={"model": MODEL}).json()
    assert "tools" in show["capabilities"]


def test_the_model_must_choose_between_a_call_and_an_answer(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    say(plain, "<answer>Hi")
    ask(sdk)
    calls, answer = format_of(plain)["elements"]
    assert begins_of(calls) == ["weather", "news"]
    assert calls["tags"][0]["content"]["json_schema"]["properties"] == WEATHER["properties"]
    assert calls["stop_after_first"]
    mark, text = answer["elements"]
    assert mark["value"] == "<answer>"
    assert text["type"] == "triggered_tags"
    assert text["triggers"] == ["<tool_call>"]
    ask(sdk, parallel_tool_calls=True)
    calls, _ = format_of(plain)["elements"]
    assert not calls["stop_after_first"]


def test_a_forced_call_has_the_form_that_the_prompt_describes(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    say(plain, f"{NEWS}\n{CALL}")
    [choice] = ask(sdk, tool_choice="required", parallel_tool_calls=True).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["news", "weather"]
    assert begins_of(format_of(plain)) == ["weather", "news"]
    named = {"type": "function", "function": {"name": "news"}}
    say(plain, NEWS)
    [choice] = ask(sdk, tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["news"]
    assert begins_of(format_of(plain)) == ["news"]
    assert format_of(plain)["at_least_one"]


def test_without_a_choice_of_tools_they_are_described_and_not_called(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    prompts = record_prompts(plain, f"<answer>Like {CALL}")
    [choice] = ask(sdk, tool_choice="none").choices
    assert choice.message.content == f"Like {CALL}"
    assert not choice.message.tool_calls
    ask(sdk)
    assert prompts[0] == prompts[1]
    assert begins_of(format_of(plain)["elements"][0]) == ["weather", "news"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_is_reported_as_far_as_it_came(
    sdk: openai.OpenAI, plain: RunningServer, stream: bool
) -> None:
    say(plain, CALL)
    found = ask(sdk, tool_choice="required", stream=stream, max_tokens=len(CALL) - 20)
    if stream:
        chunks = list(found)
        deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(one.function.arguments for one in deltas)
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = found.choices
        [call] = choice.message.tool_calls
        arguments = call.function.arguments
        reason = choice.finish_reason
    assert arguments == '{"city": "'
    assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, CALL.index("weather") + 3])
def test_a_forced_call_that_is_cut_off_before_its_name_is_no_text(
    sdk: openai.OpenAI, plain: RunningServer, stream: bool, num_tokens: int
) -> None:
    say(plain, CALL)
    found = ask(sdk, tool_choice="required", stream=stream, max_tokens=num_tokens)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        assert not "".join(delta.content or "" for delta in deltas)
        assert not any(delta.tool_calls for delta in deltas)
        return
    [choice] = found.choices
    assert not choice.message.content
    assert not choice.message.tool_calls
    assert choice.finish_reason == "length"


def test_an_optional_call_that_is_cut_off_is_a_call_as_far_as_it_came(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    say(plain, CALL)
    [choice] = ask(sdk, max_tokens=len(CALL) - 20).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments in CALL[:-20]
    assert not choice.message.content


def test_an_answer_with_another_constraint_is_held_to_that_one_alone(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    say(plain, '{"name": "weather"}')
    [choice] = ask(sdk, response_format={"type": "json_object"}).choices
    assert choice.message.content == '{"name": "weather"}'
    grammar = plain.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


def test_an_answer_that_goes_on_gets_no_second_mark(
    sdk: openai.OpenAI, plain: RunningServer
) -> None:
    prompts = record_prompts(plain, " umbrella.")
    messages = [*HI, {"role": "assistant", "content": "Take an"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    [choice] = ask(sdk, messages=messages, extra_body=extra).choices
    assert choice.message.content == " umbrella."
    assert prompts[0].endswith("assistant\n<answer>Take an")
    assert format_of(plain)["type"] == "triggered_tags"


def test_reasoning_comes_before_the_choice() -> None:
    config = ServerConfig(drain_s=1.0, reasoning_parser="qwen3")
    with (
        running(config) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        say(server, f"<think>\nIt rains.\n</think>\n\n{CALL}")
        [choice] = ask(sdk).choices
        assert choice.message.reasoning_content.strip() == "It rains."
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        grammar = server.engine.seen[-1].sampling.grammar
        assert grammar is not None
        assert grammar.behind is not None
        say(server, "<think>\nIt rains.\n</think>\n\n<answer>Yes.")
        [choice] = ask(sdk).choices
        assert choice.message.content == "Yes."
        [choice] = ask(sdk, extra_body={"separate_reasoning": False}).choices
        assert choice.message.content == "<think>\nIt rains.\n</think>\n\nYes."


def test_prompts_can_be_seen(plain: RunningServer) -> None:
    body = {"messages": HI, "tools": TOOLS}
    prompt = httpx.post(f"{plain.url}/apply-template", json=body).json()["prompt"]
    assert prompt.startswith(f"<|im_start|>system\n{described(TOOLS)}<|im_end|>\n")

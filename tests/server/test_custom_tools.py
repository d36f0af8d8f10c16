"""Custom tools: shown to the model as functions with one text, told to clients as custom calls."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.fake import MODEL, RunningServer
from tests.server.scripted import CALL, HI, TOOLS, ask, record_prompts, say
from weft.server.chat.custom_tools import CustomCall, CustomCalls, arguments_of, input_of
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event

CODE = 'print("ä")\n'
RUN = {"name": "run", "description": "Runs code.", "format": {"type": "text"}}
CUSTOM = [*TOOLS, {"type": "custom", "custom": RUN}]
FLAT: list[Any] = [{"type": "custom", **RUN}]
CALL_RUN = f'<tool_call>{{"name": "run", "arguments": {arguments_of(CODE)}}}</tool_call>'
FORCED_RUN = f'[{{"name": "run", "parameters": {arguments_of(CODE)}}}]'
TEXTS = ["", "a", CODE, 'quotes " and \\', "😀 ä \u2028", "\x00\x1f", "{}", "x" * 5_000]


@pytest.mark.parametrize("text", TEXTS)
def test_an_input_comes_back_from_its_arguments(text: str) -> None:
    assert input_of(arguments_of(text)) == text
    assert input_of(json.dumps({"input": text}, indent=2)) == text


@pytest.mark.parametrize("text", TEXTS[:-1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_arguments_that_are_cut_anywhere_give_a_beginning_of_the_input(
    text: str, ascii_only: bool
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    longest = ""
    for end in range(len(arguments) + 1):
        found = input_of(arguments[:end])
        assert text.startswith(found)
        assert len(found) >= len(longest)
        longest = found
    assert longest == text


def test_other_arguments_are_the_input_themselves() -> None:
    assert input_of('{"code": "1"}') == '{"code": "1"}'


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_calls_of_functions_and_text_pass_between_custom_calls(size: int) -> None:
    events: list[Event] = [
        *(
            AnswerText("Well."),
            CallBegin(0, "run"),
            CallArguments(0, '{"input": '),
            CallArguments(0, '"a"}'),
        ),
        *(
            CallBegin(1, "news"),
            CallArguments(1, "{}"),
            CallBegin(2, "run"),
            CallArguments(2, '{"input": "b"}'),
        ),
    ]
    calls = CustomCalls(frozenset({"run"}))
    found = []
    for begin in range(0, len(events), size):
        found += calls.take(events[begin : begin + size], is_last=begin + size >= len(events))
    assert found == [
        *(
            AnswerText("Well."),
            CustomCall(0, "run", "a"),
            CallBegin(1, "news"),
            CallArguments(1, "{}"),
        ),
        CustomCall(2, "run", "b"),
    ]


def test_an_answer_has_calls_of_custom_tools_beside_those_of_functions(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, CALL_RUN + CALL)
    [choice] = ask(tool_sdk, tools=CUSTOM).choices
    assert choice.finish_reason == "tool_calls"
    first, second = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "run", CODE)
    assert first.id.startswith("call_")
    assert (second.type, second.function.name) == ("function", "weather")


def test_a_stream_tells_a_custom_call_once_and_whole(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, CALL_RUN + CALL)
    chunks = list(ask(tool_sdk, tools=CUSTOM, stream=True))
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    [custom] = [one for one in deltas if one.type == "custom"]
    assert (custom.index, custom.custom) == (0, {"name": "run", "input": CODE})
    arguments = "".join(one.function.arguments for one in deltas if one.index == 1)
    assert json.loads(arguments) == {"city": "Oslo"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_custom_tool_can_be_forced(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, is_flat: bool
) -> None:
    say(tool_server, FORCED_RUN)
    choice = (
        {"type": "custom", "name": "run"}
        if is_flat
        else {"type": "custom", "custom": {"name": "run"}}
    )
    [found] = ask(tool_sdk, tools=CUSTOM, tool_choice=choice).choices
    [call] = found.message.tool_calls
    assert call.custom.input == CODE
    schema = json.loads(tool_server.engine.seen[0].sampling.grammar.text)
    assert schema["items"]["properties"]["name"] == {"const": "run"}
    assert schema["items"]["properties"]["parameters"]["required"] == ["input"]


def test_custom_tools_can_be_the_only_ones_that_are_allowed(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, FORCED_RUN)
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    [found] = ask(tool_sdk, tools=CUSTOM, tool_choice=choice).choices
    assert found.message.tool_calls[0].custom.name == "run"


def test_a_forced_custom_call_that_is_cut_off_is_reported_as_far_as_it_came(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, '[{"name": "run", "parameters": {"input": "pri\\')
    choice = {"type": "custom", "custom": {"name": "run"}}
    [found] = ask(tool_sdk, tools=CUSTOM, tool_choice=choice).choices
    assert found.message.tool_calls[0].custom.input == "pri"
    assert found.finish_reason != "tool_calls"


def test_the_history_has_custom_calls_as_the_model_writes_them(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    prompts = record_prompts(tool_server, "Done.")
    calls: dict[str, list[dict[str, Any]]] = {
        "custom": [{"id": "c", "type": "custom", "custom": {"name": "run", "input": CODE}}],
        "function": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "run", "arguments": arguments_of(CODE)},
            }
        ],
    }
    for kind in ("custom", "function"):
        messages = [
            *HI,
            {"role": "assistant", "tool_calls": calls[kind]},
            {"role": "tool", "tool_call_id": "c", "content": "ä"},
        ]
        ask(tool_sdk, messages=messages, tools=CUSTOM)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("custom", "param"),
    [
        (7, "tools[0]"),
        ({"name": "a b"}, "tools[0].custom.name"),
        ({}, "tools[0].custom.name"),
        ({"name": ["a"]}, "tools[0].custom.name"),
        ({"name": "run", "format": "text?"}, "tools[0].custom.format"),
        (
            {"name": "run", "format": {"type": "grammar", "grammar": {}}},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"name": "run", "format": {"type": "grammar", "syntax": "lark", "definition": " "}},
            "tools[0].custom.format.definition",
        ),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_custom_tools_that_cannot_be_served_are_refused_by_name(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, custom: Any, param: str, choice: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_sdk, tools=[{"type": "custom", "custom": custom}], tool_choice=choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "weather"}},
        {"type": "function", "function": {"name": "run"}},
        {"type": "custom", "custom": {"name": "other"}},
        {"type": "custom"},
    ],
)
def test_a_choice_of_a_tool_that_is_of_another_kind_or_not_there_is_refused(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, choice: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_sdk, tools=CUSTOM, tool_choice=choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "custom", [None, 7, {"name": "run"}, {"name": 7, "input": "x"}, {"input": "x"}]
)
def test_a_custom_call_of_the_history_needs_name_and_input(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, custom: Any
) -> None:
    call = {"id": "c", "type": "custom", "custom": custom}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_sdk, messages=[*HI, {"role": "assistant", "tool_calls": [call]}, *HI])
    assert caught.value.param == "messages[1].tool_calls[0]"


def test_a_response_has_custom_calls_as_items(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, CALL_RUN)
    answer = tool_sdk.responses.create(model=MODEL, input="Hi", tools=FLAT)
    [item] = answer.output
    assert (item.type, item.name, item.input, item.status) == (
        "custom_tool_call",
        "run",
        CODE,
        "completed",
    )
    assert item.call_id.startswith("call_")
    prompts = record_prompts(tool_server, "Done.")
    output: list[Any] = [
        {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ä"}
    ]
    tool_sdk.responses.create(model=MODEL, input=output, previous_response_id=answer.id)
    call: Any = {"type": "custom_tool_call", "call_id": item.call_id, "name": "run", "input": CODE}
    tool_sdk.responses.create(model=MODEL, input=[{"role": "user", "content": "Hi"}, call, *output])
    assert prompts[0] == prompts[1]
    assert "tool\nä" in prompts[0]


def test_a_stream_of_a_response_tells_the_input_of_a_custom_call(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, CALL_RUN)
    events = list(tool_sdk.responses.create(model=MODEL, input="Hi", tools=FLAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    begin = kinds.index("response.output_item.added")
    assert kinds[begin:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    delta, done, item = events[begin + 1 : begin + 4]
    assert delta.delta == done.input == item.item.input == CODE
    assert {delta.item_id, done.item_id} == {item.item.id}

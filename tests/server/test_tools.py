"""Tools and reasoning of chat completions, with the official SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, as_bytes, running
from tests.server.scripted import CALL, HI, OSLO, THOUGHT, TOOLS, TWO, WEATHER, ask, say
from tests.server.turns import CHAT, ITEMS, MESSAGES, Client
from weft.config.server import ServerConfig
from weft.json_types import PATH_KEY
from weft.messages.sampling import ThinkingMarks


def test_calls_are_reported_with_ids_names_and_arguments(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, TWO)
    [choice] = ask(tool_sdk).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well.\n"
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == (
        "function",
        "weather",
        OSLO,
    )
    assert (second.function.name, second.function.arguments) == ("news", "{}")
    assert first.id.startswith("call_")
    assert first.id != second.id


def test_a_stream_tells_each_name_once_and_arguments_in_pieces(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, TWO)
    tool_server.engine.step_s = 0.0005
    chunks = list(ask(tool_sdk, stream=True))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    begun = [delta for delta in deltas if delta.id]
    assert [(delta.index, delta.function.name, delta.function.arguments) for delta in begun] == [
        (0, "weather", ""),
        (1, "news", ""),
    ]
    pieces = [delta.function.arguments for delta in deltas if not delta.id and delta.index == 0]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == OSLO
    assert all(delta.function.name is None for delta in deltas if not delta.id)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Well.\n"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_sdk_puts_a_stream_together(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, TWO)
    with tool_sdk.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream:
        [choice] = stream.get_final_completion().choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "news"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_is_text(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    broken = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    say(tool_server, broken)
    found = ask(tool_sdk, stream=stream)
    if stream:
        chunks = list(found)
        text, reason = (
            "".join(one.choices[0].delta.content or "" for one in chunks),
            chunks[-1].choices[0].finish_reason,
        )
    else:
        text, reason = found.choices[0].message.content, found.choices[0].finish_reason
    assert (text, reason) == (broken, "stop")


def test_only_one_call_if_they_may_not_be_parallel(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, TWO)
    [choice] = ask(tool_sdk, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def placed(schema: dict[str, Any], index: int) -> dict[str, Any]:
    """The schema of a tool as a grammar has it: an error names where the client wrote it."""
    return {**schema, PATH_KEY: f"tools[{index}].function.parameters"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_held_to_its_schema(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    say(tool_server, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    choice = {"type": "function", "function": {"name": "weather"}}
    with tool_sdk.chat.completions.stream(
        model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice
    ) as events:
        [found] = events.get_final_completion().choices
    if not stream:
        [found] = ask(tool_sdk, tool_choice=choice).choices
    [call] = found.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", OSLO)
    assert found.finish_reason == "tool_calls"
    grammar = tool_server.engine.seen[-1].sampling.grammar
    assert grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"]["properties"] == {
        "name": {"const": "weather"},
        "parameters": placed(WEATHER, 0),
    }


def test_required_allows_every_tool_and_several_calls(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(
        tool_server,
        '[{"name": "news", "parameters": {}}, {"name": "weather", "parameters": {"city": "Oslo"}}]',
    )
    [choice] = ask(tool_sdk, tool_choice="required").choices
    assert [call.function.name for call in choice.message.tool_calls] == ["news", "weather"]
    assert choice.message.content is None
    schema = json.loads(tool_server.engine.seen[0].sampling.grammar.text)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == [
        "weather",
        "news",
    ]
    assert "maxItems" not in schema


CUTS = [
    ('[{"name": "weather", "parameters": {"city": "Os', "weather", '{"city": "Os'),
    ('[{"name": "weather", "parameters": {', "weather", "{"),
    ('[{"name": "weather", "par', "weather", ""),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("said", "name", "arguments"), CUTS)
def test_a_forced_call_that_is_cut_off_is_reported_as_far_as_it_came(
    tool_sdk: openai.OpenAI,
    tool_server: RunningServer,
    stream: bool,
    said: str,
    name: str,
    arguments: str,
) -> None:
    say(tool_server, said + "x" * 100)
    chunks = ask(tool_sdk, tool_choice="required", stream=stream, max_tokens=len(said))
    if stream:
        last = list(chunks)
        deltas = [one for chunk in last for one in chunk.choices[0].delta.tool_calls or ()]
        assert deltas[0].function.name == name
        assert "".join(one.function.arguments for one in deltas) == arguments
        assert not "".join(chunk.choices[0].delta.content or "" for chunk in last)
        assert last[-1].choices[0].finish_reason == "length"
        return
    [choice] = chunks.choices
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.message.content) == (
        name,
        arguments,
        None,
    )
    assert choice.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_within_a_call_is_no_end_with_calls(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    say(tool_server, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    found = ask(tool_sdk, tool_choice="required", stream=stream, stop=["Os"])
    assert (list(found)[-1] if stream else found).choices[0].finish_reason == "stop"


def test_a_response_tells_the_call_that_was_cut_off_and_forgets_it(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    say(tool_server, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    first = tool_sdk.responses.create(
        input="Hi", tools=tools, tool_choice="required", max_output_tokens=45
    )  # type: ignore[call-overload]
    [item] = first.output
    assert (first.status, item.type, item.name) == ("incomplete", "function_call", "weather")
    assert item.arguments == '{"city": "'
    assert item.status == "incomplete"
    say(tool_server, "Well.")
    second = tool_sdk.responses.create(input="Go on", previous_response_id=first.id)
    assert second.output_text == "Well."


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_where_arguments_are_objects_a_call_that_is_cut_off_is_text(
    tool_server: RunningServer, path: str
) -> None:
    say(tool_server, CALL[:40])
    tool = {"name": "weather", "input_schema": WEATHER}
    body = {
        "model": MODEL,
        "messages": HI,
        "max_tokens": 40,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    if path == "/api/chat":
        body = {"model": MODEL, "messages": HI, "stream": False, "tools": TOOLS}
    answer = httpx.post(tool_server.url + path, json=body)
    assert answer.status_code == 200
    told = (
        answer.json()["message"]["content"]
        if path == "/api/chat"
        else answer.json()["content"][0]["text"]
    )
    assert "weather" in told


def test_a_forced_call_finds_what_its_schema_refers_to(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "[]")
    place = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": WEATHER},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": place}} for name in ("a", "b")
    ]
    for given in (tools[:1], tools):
        ask(tool_sdk, tools=given, tool_choice="required")
        schema = json.loads(tool_server.engine.seen[-1].sampling.grammar.text)
        for call in schema["items"].get("anyOf", [schema["items"]]):
            found = schema
            for part in call["properties"]["parameters"]["properties"]["at"]["$ref"].split("/")[1:]:
                found = found[int(part) if isinstance(found, list) else part]
            assert found == WEATHER


def test_a_tool_without_parameters_takes_none(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, "[]")
    ask(tool_sdk, tool_choice={"type": "function", "function": {"name": "news"}})
    schema = json.loads(tool_server.engine.seen[-1].sampling.grammar.text)
    nothing = {"type": "object", "properties": {}}
    assert schema["items"]["properties"]["parameters"] == placed(nothing, 1)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS + TOOLS}, f"tools[{len(TOOLS)}].function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"regex": "a"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_name(
    tool_sdk: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_sdk, **options)
    assert caught.value.param == param


def test_a_tool_without_a_function_is_refused_with_the_missing_field(
    tool_sdk: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\] has no object 'function'"):
        ask(tool_sdk, tools=[{"type": "function"}])


def test_special_tokens_show_while_calls_are_looked_for(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    ask(tool_sdk)
    ask(tool_sdk, tool_choice="none", extra_body={"separate_reasoning": False})
    assert [one.sampling.skip_special_tokens for one in tool_server.engine.seen] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_beside_the_answer(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    say(tool_server, THOUGHT)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    found = ask(tool_sdk, tools=[], stream=stream, **options)
    if stream:
        chunks = list(found)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        text, usage = "".join(delta.content or "" for delta in deltas), chunks[-1].usage
    else:
        message, usage = found.choices[0].message, found.usage
        reasoning, text = message.reasoning_content, message.content
    assert (reasoning, text) == ("It rains.\n", "Yes.")
    assert usage.completion_tokens_details.reasoning_tokens == len("It rains.\n")


FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER}}}
MARKS = ThinkingMarks(tuple(as_bytes("<think>")), tuple(as_bytes("</think>")), is_open=False)
OPEN = ThinkingMarks(MARKS.begin, MARKS.end, is_open=True)


@pytest.mark.parametrize(
    ("prompt", "marks"),
    [
        ("Hi", MARKS),
        ("Hi<think>\n", OPEN),
        ("Hi<think>\n</think>\n\n", None),
        ("</think> Hi", MARKS),
    ],
)
@pytest.mark.parametrize("fields", [{"tools": None, **FORM}, {"tool_choice": "required"}])
def test_a_grammar_holds_behind_the_reasoning_that_is_open_or_may_come(
    tool_sdk: openai.OpenAI,
    tool_server: RunningServer,
    prompt: str,
    marks: ThinkingMarks | None,
    fields: Any,
) -> None:
    ask(tool_sdk, **fields, extra_body={"input_ids": as_bytes(prompt)})
    [request] = tool_server.engine.seen
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.behind == marks


def test_with_grammar_in_reasoning_a_grammar_holds_from_the_first_token_on() -> None:
    config = ServerConfig(drain_s=1.0, reasoning_parser="qwen3", grammar_in_reasoning=True)
    with running(config) as server:
        say(server, '{"city": "<think>"}')
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI, **FORM})
        [request] = server.engine.seen
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.behind is None
    assert answer.json()["choices"][0]["message"]["content"] == '{"city": "<think>"}'


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_may_come_behind_reasoning(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    calls = [{"name": "weather", "parameters": OSLO}, {"name": "news", "parameters": {}}]
    say(tool_server, f"<think>\nHm [1].\n</think>\n\n{json.dumps(calls)}")
    found = ask(tool_sdk, tool_choice="required", stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        told = [
            call.function
            for delta in deltas
            for call in delta.tool_calls or []
            if call.function.name
        ]
    else:
        reasoning, told = (
            found.choices[0].message.reasoning_content,
            found.choices[0].message.tool_calls,
        )
        told = [call.function for call in told]
    assert reasoning == "Hm [1].\n"
    assert [one.name for one in told] == ["weather", "news"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_strict_tools_are_held_to_their_schemas_where_the_model_chooses(
    tool_sdk: openai.OpenAI, tool_server: RunningServer, stream: bool
) -> None:
    say(tool_server, TWO)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    found = ask(tool_sdk, tools=strict, stream=stream)
    if stream:
        found = list(found)
        assert [
            c.function.name
            for one in found
            for c in one.choices[0].delta.tool_calls or []
            if c.function.name
        ] == [
            "weather",
            "news",
        ]
    ask(tool_sdk)
    one, other = (request.sampling.grammar for request in tool_server.engine.seen)
    assert other is None  # without a strict tool nothing is held to anything
    assert one is not None
    assert (one.kind, one.behind) == ("structural_tag", MARKS)
    format = json.loads(one.text)["format"]
    assert (format["type"], format["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [
        (tag["begin"], tag["content"]["json_schema"], tag["end"]) for tag in format["tags"]
    ] == [
        (
            '<tool_call>\n{"name": "weather", "arguments": ',
            placed(WEATHER, 0),
            "}\n</tool_call>",
        ),
        ('<tool_call>\n{"name": "news", "arguments": ', {"type": "object"}, "}\n</tool_call>"),
    ]


def test_reasoning_may_stay_or_be_left_out(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    say(tool_server, THOUGHT)
    [together] = ask(tool_sdk, tools=[], extra_body={"separate_reasoning": False}).choices
    assert together.message.content == THOUGHT
    [without] = ask(tool_sdk, tools=[], extra_body={"include_reasoning": False}).choices
    assert without.message.content == "Yes."
    assert not hasattr(without.message, "reasoning_content")


def test_a_conversation_with_calls_reaches_the_template(
    tool_sdk: openai.OpenAI, tool_server: RunningServer
) -> None:
    tool_server.engine.script = lambda ids: ids
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = ask(
        tool_sdk, messages=history, tool_choice="none", extra_body={"separate_reasoning": False}
    )
    assert "tool\nrain" in answer.choices[0].message.content


def test_logprobs_stand_beside_calls(tool_sdk: openai.OpenAI, tool_server: RunningServer) -> None:
    say(tool_server, CALL)
    chunks = list(ask(tool_sdk, stream=True, logprobs=True))
    told = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert bytes(byte for entry in told for byte in entry.bytes).decode() == CALL + "<eos>"


def test_two_tools_of_one_name_are_refused_with_it(tool_sdk: openai.OpenAI) -> None:
    number = len(TOOLS)
    message = "is 'weather', which is already the name of tools\\[0\\]"
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(tool_sdk, tools=[*TOOLS, TOOLS[0]])
    assert caught.value.param == f"tools[{number}].function.name"


QUOTING = "<think>\nQuestion: 2+2?\n</think>\n\n4\nQuestion: 3+3?"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["stop", "stop_regex"])
@pytest.mark.parametrize("client", [CHAT, ITEMS, MESSAGES], ids=lambda client: client.name)
def test_stop_strings_end_the_answer_and_not_the_reasoning(
    tool_server: RunningServer, client: Client, kind: str, stream: bool
) -> None:
    say(tool_server, QUOTING)
    body = {**client.first(), kind: ["Question:"]}
    with httpx.Client(base_url=tool_server.url, timeout=HANG_S) as http:
        found = json.dumps(client.ask(http, body, stream=stream, most=200))
        body["stop_in_reasoning"] = True
        cut = json.dumps(client.ask(http, body, stream=stream, most=200))
    assert "Question: 2+2?" in found
    assert json.dumps("4\n") in found
    assert "3+3" not in found
    assert "2+2" not in cut


def test_min_tokens_do_not_hide_the_end_of_the_reasoning(tool_server: RunningServer) -> None:
    say(tool_server, QUOTING)
    for min_tokens, content in ((10, "4\n"), (60, "4\nQuestion: 3+3?")):
        body = {"messages": HI, "stop": "Question:", "min_tokens": min_tokens}
        answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == content

"""What today's models write is found in their texts, however these are cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.text.parsed import (
    answer_text,
    argument_texts,
    calls_in,
    cut_at,
    joined,
    parse,
    reasoning_text,
)
from tests.text.written_calls import (
    CALLS,
    CUT,
    NAMES,
    SCHEMAS,
    TEXTS,
    THOUGHTS,
    TO_F,
    Thought,
    Written,
)
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from weft.text.parsers.output import ParsedOutput, Parser
from weft.text.parsers.typed_values import ArgumentTypes

FORMATS = sorted(TOOL_FORMATS)
DROPS_MARKS = {"deepseek"}  # those around calls, also where there are none
# Pieces of marks, out of which texts are put together that begin calls and do not end them.
FRAGMENTS = sorted(
    {
        *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=s>\n", "</parameter>"),
        *("</function>", "<arg_key>s</arg_key>", "<arg_value>", "</arg_value>", "<tool_calls>"),
        *("<minimax:tool_call>", '<invoke name="f">', '<parameter name="n">', "</invoke>"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f:0", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<|start|>", "assistant", "<|channel|>", "commentary"),
        *(" to=functions.f", "<|message|>", "<|call|>", "<|end|>", "analysis", "final", "<|tool"),
        *("<start_function_call>", "call:f{", "s:<escape>", "<escape>}", "<end_function_call>"),
        *("<|tool_call>", '<|"|>', "<tool_call|>", "<|tool_call|>", "functools", "f", "g", "\n"),
        *(
            '<｜DSML｜invoke name="f">',
            '<｜DSML｜parameter name="n" string="false">',
            "<｜tool_call",
        ),
        *("</｜DSML｜parameter>", "</｜DSML｜invoke>", "<|tool_call_start|>", "[f(s='a')]"),
        *("[TOOL_CALLS]", "f[ARGS]", '{"name": "f"}', "<|python_tag|>", ";", "[g()]", "<think>"),
        *("</think>", "<response>", "</response>", "<seed:tool_call>", "<function_call>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *('[{"name": "f", "arguments": {', '{"s": 1}', "}}]", "3", " ", "<", "}", "true", "é"),
    }
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
places = st.lists(st.integers(0, 400), max_size=6)


def tool_parser(name: str, *, eager: bool, names: frozenset[str] = NAMES) -> Parser:
    return TOOL_FORMATS[name].parser(names, eager=eager, schemas=SCHEMAS)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("written", CALLS)
def test_calls_are_found_wherever_the_text_is_cut(written: Written, eager: bool) -> None:
    text = written.text
    whole = parse(tool_parser(written.format, eager=eager), [text])
    assert calls_in(whole) == written.calls
    assert answer_text(whole) == written.around
    assert parse(tool_parser(written.format, eager=eager), list(text)) == whole
    for place in range(1, len(text)):
        assert parse(tool_parser(written.format, eager=eager), cut_at(text, [place])) == whole


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_text_that_is_no_call_comes_back_unchanged(name: str, text: str, eager: bool) -> None:
    for pieces in ([text], list(text)):
        assert parse(tool_parser(name, eager=eager), pieces) == [AnswerText(text)]


@pytest.mark.parametrize(("name", "text", "told"), CUT)
def test_a_stream_has_emitted_the_received_part_of_a_truncated_call(
    name: str, text: str, told: str
) -> None:
    for pieces in ([text], list(text)):
        parser = tool_parser(name, eager=True)
        events = parse(parser, pieces)
        assert argument_texts(events) == [("f", told)]
        assert parser.has_cut
        assert parse(tool_parser(name, eager=False), pieces) == [AnswerText(text)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@seed(1)
@settings(max_examples=12, deadline=None, database=None)
@given(text=texts, places=places)
def test_any_text_gives_the_same_events_wherever_it_is_cut(
    name: str, eager: bool, text: str, places: list[int]
) -> None:
    whole = parse(tool_parser(name, eager=eager), [text])
    assert parse(tool_parser(name, eager=eager), cut_at(text, places)) == whole
    found = argument_texts(whole)
    if not eager:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found)
    if not found and name not in DROPS_MARKS:
        assert answer_text(whole) == text


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in DROPS_MARKS])
@seed(2)
@settings(max_examples=10, deadline=None, database=None)
@given(text=texts, places=places)
def test_without_tools_no_text_is_changed(name: str, text: str, places: list[int]) -> None:
    events = parse(tool_parser(name, eager=True, names=frozenset()), cut_at(text, places))
    assert answer_text(events) == text
    assert calls_in(events) == []


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
@seed(3)
@settings(max_examples=12, deadline=None, database=None)
@given(text=texts, places=places, thinks=st.booleans())
def test_reasoning_is_the_same_wherever_the_text_is_cut(
    name: str, text: str, places: list[int], thinks: bool
) -> None:
    format = REASONING_FORMATS[name]
    if thinks:
        text = f"{format.begin}a{format.end}{text}"
    whole = parse(format.parser("", eager=True), [text])
    assert parse(format.parser("", eager=True), cut_at(text, places)) == whole


@pytest.mark.parametrize("thought", THOUGHTS)
def test_reasoning_is_distinguished_wherever_the_text_is_cut(thought: Thought) -> None:
    format = REASONING_FORMATS[thought.format]
    text = thought.text
    splits = [[text], list(text), *(cut_at(text, [place]) for place in range(1, len(text)))]
    for pieces in splits:
        events = parse(format.parser(thought.prompt_end, eager=True), pieces)
        assert reasoning_text(events) == thought.reasoning
        assert answer_text(events) == thought.answer


def test_calls_between_messages_of_reasoning_are_found_behind_it() -> None:
    def parsed(pieces: list[str]) -> list[Event]:
        thoughts = REASONING_FORMATS["gpt_oss"].parser("<|start|>assistant", eager=True)
        output = ParsedOutput(thoughts, tool_parser("gpt_oss", eager=True))
        events = [event for piece in pieces for event in output.push(piece)]
        return joined([*events, *output.push("", is_last=True)])

    text = f"<|channel|>analysis<|message|>Hm.<|end|>{TO_F}"
    assert parsed([text]) == [ReasoningText("Hm."), CallBegin(0, "f"), CallArguments(0, '{"n": 3}')]
    assert parsed(list(text)) == parsed([text])


def test_a_string_in_xml_is_reported_while_it_is_written() -> None:
    parser = tool_parser("qwen3_coder", eager=True)
    assert parser.push("<tool_call>\n<function=f>\n<par") == [
        CallBegin(0, "f"),
        CallArguments(0, "{"),
    ]
    parser.push("ameter=s>\n")
    assert parser.push('say "hi"') == [CallArguments(0, 'say \\"hi\\"')]
    assert parser.push("\n") == []  # perhaps the line break before the closing tag
    assert parser.push("more\n</parameter>\n</function>")[0] == CallArguments(0, "\\nmore")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab<>\"'\\\n é", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "a": st.lists(json_values, max_size=3),
        "o": st.dictionaries(st.text("abc", min_size=1), json_values, max_size=3),
        "b": st.booleans(),
        "n": st.integers(),
        "x": st.integers(-100, 100).map(lambda number: number / 8),
        "s": st.text("ab<>\"'\\\n/ é0", max_size=12),
    },
)


def as_bare(value: Any) -> str:
    """As templates write a value: strings bare, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def written_call(format: str, given: dict[str, Any]) -> str:
    """A call of `f` as the family's template writes it."""
    pairs = [(key, as_bare(value)) for key, value in given.items()]
    match format:
        case "qwen3_coder":
            inner = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in pairs)
            return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
        case "glm45":
            inner = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in pairs
            )
            return f"<tool_call>f\n{inner}</tool_call>"
        case "minimax_m2":
            inner = "".join(f'<parameter name="{key}">{one}</parameter>\n' for key, one in pairs)
            return f'<minimax:tool_call>\n<invoke name="f">\n{inner}</invoke>\n</minimax:tool_call>'
    return f"<start_function_call>call:f{as_gemma(given)}<end_function_call>"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "functiongemma"])
@pytest.mark.parametrize("eager", [False, True])
@seed(4)
@settings(max_examples=12, deadline=None, database=None)
@given(given_arguments=arguments, places=places)
def test_arguments_come_back_with_the_types_of_the_schema(
    name: str, eager: bool, given_arguments: dict[str, Any], places: list[int]
) -> None:
    text = written_call(name, given_arguments)
    events = parse(tool_parser(name, eager=eager), cut_at(text, places))
    assert calls_in(events) == [("f", given_arguments)]
    assert answer_text(events) == ""


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 4}, "4", 4),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "null", None),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "007", "007"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/nowhere"}, "text", "text"),
        ({}, '{"a": [1]}', {"a": [1]}),
        ({}, "text", "text"),
        (True, "5", 5),
    ],
)
def test_bare_text_becomes_a_value_by_its_schema(schema: Any, text: str, value: object) -> None:
    definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    types = ArgumentTypes({"properties": {"x": schema}, "$defs": definitions})
    assert json.loads(types.as_json("x", text)) == value


def test_an_argument_that_comes_twice_is_no_call() -> None:
    text = "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value>"
    text += "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
    assert parse(tool_parser("glm45", eager=False), [text]) == [AnswerText(text)]


OPENINGS = [
    ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
    ("qwen3_coder", "<function=f>"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="'),
    ("minimax_m1", "<tool_calls>"),
    ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a":'),
    ("gpt_oss", "<|channel|>commentary to=functions.f"),
    ("gemma4", "<|tool_call>call:f{a:"),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a":'),
    ("phi4", "functools[{"),
]
FILLINGS = [
    *("[", '{"name":', " ", "<", "\n</", "<function=f>", "<parameter=a>1</parameter>", "{a:["),
    *("<tool_call>", "<|start|>assistant", "<|channel|>analysis<|message|>", "<arg_key>a", '<|"|>'),
]


@pytest.mark.parametrize(("name", "opening"), OPENINGS)
@pytest.mark.parametrize("filling", FILLINGS)
def test_hostile_text_costs_time_in_proportion(name: str, opening: str, filling: str) -> None:
    text = opening + filling * (20_000 // len(filling))
    began_s = time.thread_time()
    pieces = cut_at(text, range(0, len(text), 500))
    assert parse(tool_parser(name, eager=False), pieces) == [AnswerText(text)]
    parse(tool_parser(name, eager=True), pieces)
    thoughts = REASONING_FORMATS["gpt_oss"].parser("", eager=True)
    parse(thoughts, pieces)
    # Seconds of a processor, of which a hundredth is needed; thrice the text may take nine times as
    # long where a format is at fault.
    assert time.thread_time() - began_s < 2.2

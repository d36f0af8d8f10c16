"""Tool calls and reasoning in a model's text, however it is cut into pieces."""

from __future__ import annotations

import json
import time

import pytest

from tests.text.parsed import argument_texts
from tests.text.template_families import LLAMA_3_2
from weft.config.options import options_of
from weft.config.server import ServerConfig
from weft.text.parsers.events import AnswerText, CallArguments, CallBegin, Event, ReasoningText
from weft.text.parsers.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
    find_formats,
)
from weft.text.parsers.output import ParsedOutput, Parser

NAMES = frozenset({"f", "g"})
F = ("f", {"a": [1, {"b": '}"'}], "c": None})
F_JSON = '{"a": [1, {"b": "}\\""}], "c": null}'

CALLS = [
    (
        "hermes",
        f'Ok.\n<tool_call>\n{{"name": "f", "arguments": {F_JSON}}}\n</tool_call>\nBye',
        "Ok.\n|Bye",
        [F],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n<tool_call>{"name": "f"}',
        "",
        [("g", {}), ("f", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    (
        "llama3",
        f'{{"name": "f", "parameters": {F_JSON}}}; {{"name": "g", "parameters": {{}}}}',
        "",
        [F, ("g", {})],
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "g", "parameters": {"x": -1.5e3}}',
        "",
        [("g", {"x": -1500.0})],
    ),
    (
        "mistral",
        f'Hm [TOOL_CALLS] [{{"name": "f", "arguments": {F_JSON}}}, {{"name": "g"}}]',
        "Hm ",
        [F, ("g", {})],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{F_JSON}[TOOL_CALLS]g[ARGS]{{}}",
        "",
        [F, ("g", {})],
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        f"```json\n{F_JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [F, ("g", {})],
    ),
    (
        "llama3",
        f'{{"name": "f", "parameters": {F_JSON}}}\n{{"name": "g", "parameters": {{}}}}\n',
        "",
        [F, ("g", {})],
    ),
    (
        "llama3",
        '{"name": "g", "parameters": {}},\n{"name": "f"} Done',
        "Done",
        [("g", {}), ("f", {})],
    ),
    ("llama3", '{"name": "g"}\n<|python_tag|>{"name": "f"}', "", [("g", {}), ("f", {})]),
    ("llama3", '{"name": "g"} {"answer": 42}', '{"answer": 42}', [("g", {})]),
    ("pythonic", "[f(a=[1, {'b': '}\"'}], c=None,), g()]", "", [F, ("g", {})]),
    (
        "pythonic",
        "Let me see [1].\n[g(), f(a=1)]\nDone.",
        "Let me see [1].\n|Done.",
        [("g", {}), ("f", {"a": 1})],
    ),
    ("pythonic", "[g()] and [f(a='[g()]')]", "and ", [("g", {}), ("f", {"a": "[g()]"})]),
    ("pythonic", "[[g()]", "[", [("g", {})]),
    ("pythonic", "[g(), f(a=1)", "", [("g", {}), ("f", {"a": 1})]),
]
TEXTS = [
    ("hermes", 'a <tool_call> {"name": "none", "arguments": {}} </tool_call> b'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", "if a < b and <tool_calls are"),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("llama3", '{"answer": 42}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] none of it"),
    ("mistral", "[TOOL_CALLS]" + "x" * 1_000 + "[ARGS]{}"),
    ("deepseek", "<｜tool▁call▁begin｜>none<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("llama3", 'I say {"name": "f", "parameters": {}}'),
    ("pythonic", "[1] says so"),
    ("pythonic", "use [f(a=1), or something] here"),
    ("pythonic", "use [f(a=1) here"),
    ("pythonic", "[h()]"),
    ("pythonic", "an open [ and [f(a="),
    ("pythonic", "[link](http://x)"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(a=1 b=2)]"),
    ("pythonic", "[f(a=1e999)]"),
]


def feed(parser: Parser, text: str, size: int) -> list[Event]:
    events = []
    for start in range(0, len(text), size):
        events += parser.push(text[start : start + size])
    return events + parser.flush()


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerText))


def calls_of(events: list[Event]) -> list[tuple[str, object]]:
    pieces: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallArguments):
            pieces[event.call] = pieces.get(event.call, "") + event.text
    names = [event.name for event in events if isinstance(event, CallBegin)]
    return [(name, json.loads(pieces[number])) for number, name in enumerate(names)]


@pytest.mark.pairs
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 1_000])
@pytest.mark.parametrize(("name", "text", "around", "calls"), CALLS)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, around: str, calls: object, size: int, eager: bool
) -> None:
    events = feed(TOOL_FORMATS[name].parser(NAMES, eager=eager), text, size)
    assert calls_of(events) == calls
    assert text_of(events) == around.replace("|", "")


@pytest.mark.pairs
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1_000])
@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_text_that_is_no_call_is_passed_through_unchanged(
    name: str, text: str, size: int, eager: bool
) -> None:
    events = feed(TOOL_FORMATS[name].parser(NAMES, eager=eager), text, size)
    assert calls_of(events) == []
    assert text_of(events) == text


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "apertus"])
def test_a_stream_and_a_whole_answer_tell_the_same_wherever_the_text_ends(name: str) -> None:
    call = dict(HALF_CALLS)[name].replace("VALUE", "Oslo")
    for text in (call, call.replace('"Oslo"', "tru"), call.replace('"Oslo"', "[1, {}]")):
        for end in range(1, len(text) + 1):
            found = []
            for size in (1, end):
                parser = TOOL_FORMATS[name].parser(NAMES, eager=True, tells_cut=True)
                events = feed(parser, text[:end], size)
                found.append((argument_texts(events), text_of(events), parser.has_cut))
            assert found[0] == found[1], text[:end]


def test_arguments_come_in_pieces_before_the_call_has_ended() -> None:
    parser = TOOL_FORMATS["hermes"].parser(NAMES, eager=True)
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"a": "b') == [CallBegin(0, "f"), CallArguments(0, '{"a": "b')]
    assert parser.push('c"') == [CallArguments(0, 'c"')]


def test_a_whole_call_that_cannot_be_read_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'
    events = feed(TOOL_FORMATS["hermes"].parser(NAMES, eager=False), text, 1_000)
    assert calls_of(events) == []
    assert text_of(events) == text


def test_a_broken_call_is_text_unless_a_part_was_emitted() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": tru}} rest'
    assert text_of(feed(TOOL_FORMATS["hermes"].parser(NAMES, eager=False), broken, 4)) == broken
    events = feed(TOOL_FORMATS["hermes"].parser(NAMES, eager=True), broken, 4)
    told = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert told == '{"a": tru'
    assert text_of(events) == "}} rest"


HALVES = [
    (r"\ud83d", "\ufffd"),
    (r"a\ude00b", "a\ufffdb"),
    (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    (r"\ud83d\n\ude00", "\ufffd\n\ufffd"),
    (r"\uD83D\uDE00", "\U0001f600"),
    (r"\\ud83d", r"\ud83d"),
]
HALF_CALLS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "VALUE"}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": "VALUE"}, "name": "f"}</tool_call>'),
    ("llama3", '{"name": "f", "parameters": {"a": "VALUE"}}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "VALUE"}'),
    ("apertus", '<|tools_prefix|>[{"f": {"a": "VALUE"}}]<|tools_suffix|>'),
    (
        "qwen3_coder",
        '<tool_call><function=f><parameter=a>{"b": "VALUE"}</parameter></function></tool_call>',
    ),
    ("pythonic", "[f(a='VALUE')]"),
]


@pytest.mark.parametrize(("written", "read"), HALVES)
@pytest.mark.parametrize(("name", "call"), HALF_CALLS)
def test_half_of_a_surrogate_pair_is_replaced_however_it_arrives(
    name: str, call: str, written: str, read: str
) -> None:
    text = call.replace("VALUE", written)
    found = []
    for size in (1, 3, 7, 1_000):
        for eager in (False, True):
            events = feed(TOOL_FORMATS[name].parser(NAMES, eager=eager), text, size)
            found.append(calls_of(events))
    value: object = {"b": read} if name == "qwen3_coder" else read
    assert found == [[("f", {"a": value})]] * 8


def test_a_call_that_ends_within_an_escape_tells_the_rest() -> None:
    for held, told in ((r"\ud83d", r"\ufffd"), (r"\ud83d\ude", r"\ufffd\ude"), ("\\", "\\")):
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": "{held}'
        events = feed(TOOL_FORMATS["hermes"].parser(NAMES, eager=True), text, 1)
        pieces = [event.text for event in events if isinstance(event, CallArguments)]
        assert "".join(pieces) == f'{{"a": "{told}'


OPENINGS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a":'),
    ("llama3", '{"name": "f", "parameters": {"a":'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a":'),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a":'),
    ("pythonic", "[f(a="),
]


@pytest.mark.parametrize(("name", "opening"), OPENINGS)
@pytest.mark.parametrize(
    "filling", ["[", "(", '{"name":', "<tool_call>", "[TOOL_CALLS][{", "[f(", "-", "\\", '"']
)
def test_hostile_text_costs_time_in_proportion(name: str, opening: str, filling: str) -> None:
    text = opening + filling * (100_000 // len(filling))
    began_s = time.thread_time()
    for eager in (False, True):
        events = feed(TOOL_FORMATS[name].parser(NAMES, eager=eager), text, 500)
        assert sum(len(getattr(event, "text", "")) for event in events) >= 100_000 - len(filling)
    assert (
        time.thread_time() - began_s < 20
    )  # seconds of a processor, of which a hundredth is needed


def test_pending_text_is_bounded() -> None:
    parser = TOOL_FORMATS["hermes"].parser(NAMES, eager=True)
    held = '<tool_call>{"id": "' + "x" * 70_000
    told = "".join(event.text for event in parser.push(held) if isinstance(event, AnswerText))
    assert told == held


@pytest.mark.parametrize("size", [1, 4, 1_000])
@pytest.mark.parametrize(
    ("format", "prompt", "text", "reasoning", "answer"),
    [
        ("qwen3", "assistant\n", "<think>\nWell.\n</think>\n\nYes", "Well.\n", "Yes"),
        ("qwen3", "assistant\n", "Yes <think>", "", "Yes <think>"),
        ("qwen3", "assistant\n<think>\n", "Well.</think>Yes", "Well.", "Yes"),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes", "", "Yes"),
        ("deepseek_r1", "assistant\n", "Well.</think>Yes", "Well.", "Yes"),
        ("deepseek_r1", "assistant\n", "<think>Well.", "Well.", ""),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes", "", "Yes"),
        ("mistral", "", "[THINK]Well.[/THINK]Yes", "Well.", "Yes"),
    ],
)
def test_reasoning_is_distinguished(
    format: str, prompt: str, text: str, reasoning: str, answer: str, size: int
) -> None:
    events = feed(REASONING_FORMATS[format].parser(prompt, eager=True), text, size)
    assert "".join(event.text for event in events if isinstance(event, ReasoningText)) == reasoning
    assert text_of(events) == answer


def output(**options: bool) -> ParsedOutput:
    thoughts = REASONING_FORMATS["qwen3"].parser("", eager=True)
    return ParsedOutput(thoughts, TOOL_FORMATS["hermes"].parser(NAMES, eager=True), **options)


BOTH = (
    '<think>Hm</think>\n\n<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
)


def test_calls_behind_reasoning_are_found_and_space_before_them_is_no_answer() -> None:
    events = output().push(BOTH, is_last=True)
    assert events == [
        ReasoningText("Hm"),
        *(CallBegin(0, "f"), CallArguments(0, "{}")),
        *(CallBegin(1, "g"), CallArguments(1, "{}")),
    ]


def test_only_the_first_call_and_no_reasoning_if_so_asked() -> None:
    one = output(one_call=True, keep_reasoning=False)
    assert one.push(BOTH, is_last=True) == [CallBegin(0, "f"), CallArguments(0, "{}")]
    assert one.num_calls == 1


def test_reasoning_can_be_emitted_at_once() -> None:
    whole = output(stream_reasoning=False)
    assert whole.push("<think>One ") == []
    assert whole.push("two.") == []
    assert whole.push("</think>Yes.", is_last=True) == [
        ReasoningText("One two."),
        AnswerText("Yes."),
    ]


def test_formats_are_found_in_templates_and_named_in_the_settings() -> None:
    assert find_formats("auto", "auto", ["...<tool_call>...</think>"]) == (
        TOOL_FORMATS["hermes"],
        REASONING_FORMATS["qwen3"],
    )
    assert find_formats("auto", "auto", ["plain"]) == (TOOL_FORMATS["generic"], None)
    assert find_formats("auto", "auto", []) == (None, None)  # there is no template
    assert find_formats("auto", "auto", [LLAMA_3_2]).tools == TOOL_FORMATS["llama3"]
    hunyuan = """<|extra_0|><tool_calls>[{"name": "f"}]</tool_calls><think>\n\n</think>"""
    assert find_formats("auto", "auto", [hunyuan]) == (
        TOOL_FORMATS["hunyuan_a13b"],
        REASONING_FORMATS["hunyuan_a13b"],
    )
    assert find_formats("none", "none", ["<tool_call></think>"]) == (None, None)
    assert find_formats("pythonic", "kimi", []) == (
        TOOL_FORMATS["pythonic"],
        REASONING_FORMATS["kimi"],
    )
    choices = {option.name: option.choices for option in options_of(ServerConfig)}
    assert {"auto", "none", *TOOL_FORMATS, *TOOL_ALIASES} == {*choices["tool_call_parser"]}
    assert {"auto", "none", *REASONING_FORMATS, *REASONING_ALIASES} == {
        *choices["reasoning_parser"]
    }


def test_names_of_other_engines_mean_formats_that_there_are() -> None:
    assert {*TOOL_ALIASES.values()} <= {*TOOL_FORMATS}
    assert {*REASONING_ALIASES.values()} <= {*REASONING_FORMATS}
    assert not TOOL_ALIASES.keys() & TOOL_FORMATS.keys()
    assert not REASONING_ALIASES.keys() & REASONING_FORMATS.keys()
    assert find_formats("gpt-oss", "openai_gptoss", []) == (
        TOOL_FORMATS["gpt_oss"],
        REASONING_FORMATS["gpt_oss"],
    )
    with pytest.raises(KeyError):
        find_formats("gpt", "auto", [])

"""Grammars of all kinds, and outputs that they accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import weft
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled, Compiler, Key
from weft.server.chat.call_tags import generic_tag
from weft.server.chat.tools import ToolUse, tool_use
from weft.text.parsers.formats import TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
EOS = 0
MAX_TOKENS = 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LlgCompiler:
    return LlgCompiler(FOLDER / "tokenizer.json", tokenizer.vocab_size, [EOS])


def generated(
    compiler: Compiler, tokenizer: Tokenizer, compiled: Compiled, rng: np.random.Generator
) -> str | None:
    """A text of random allowed tokens; None if it has not ended in time."""
    matcher = compiled.matcher.fork()
    mask = compiled.mask[None].copy()
    ids: list[int] = []
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(allowed[rng.integers(len(allowed))])
        matcher.consume(token)
        assert not matcher.error
        if token == EOS or matcher.is_complete:
            return tokenizer.decode([*ids, token])
        ids.append(token)
        compiler.fill([matcher], mask)
    return None


def accepts(compiler: Compiler, tokenizer: Tokenizer, compiled: Compiled, text: str) -> bool:
    """Whether the text and then the end are allowed, token by token."""
    matcher = compiled.matcher.fork()
    mask = compiled.mask[None].copy()
    for token in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        if not mask[0, token // 32] >> (token % 32) & 1:
            return token == EOS and matcher.is_complete and not matcher.error
        matcher.consume(token)
        assert not matcher.error, "the mask allows what the matcher does not"
        if token != EOS and not matcher.is_complete:
            compiler.fill([matcher], mask)
        else:
            mask[:] = 0
    return True


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value))


KINDS: list[tuple[Key, list[str], list[str]]] = [
    (Key("regex", "[0-9]{3}-[a-f]+"), ["123-af"], ["12-a", "123-", "123-afx"]),
    (Key("ebnf", 'root ::= "a" [0-9]+ ("b" | "c")*'), ["a1", "a12bcb"], ["a", "b", "a1d"]),
    (Key("ebnf", 'start: "x" num\nnum: /[0-9]/ num | "."'), ["x.", "x12."], ["x1"]),
    (Key("json_schema", "true"), ['{"a": [1]}', "3"], ["{"]),
    (Key("json_schema", '{"type": "object"}'), ["{}", '{"a": 1}'], ["[]", "1"]),
    (
        Key("json_schema", '{"properties": {"a": {}}, "type": "object"}'),
        ["{}", '{"a": 1}'],
        ['{"b": 1}'],
    ),
    (
        Key(
            "json_schema",
            '{"properties": {"a": {}, "b": {}}, "x-guidance": {"whitespace_flexible": false}}',
        ),
        ['{"a": 1, "b": [1, 2]}'],
        ['{"a":1}', '{ "a": 1}', '{"a": 1,\n"b": 1}'],
    ),
    (
        Key(
            "json_schema",
            '{"properties": {"a": {}}, "type": "object", "additionalProperties": true}',
        ),
        ["{}", '{"a": 1, "b": 1}'],
        ["[]"],
    ),
    (
        Key(
            "structural_tag",
            '{"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], '
            '"triggers": ["<f"]}',
        ),
        ["free text", "one <f>12</f> two"],
        ["<f>x</f>", "<f>1", "<fa>"],
    ),
]


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
A = tag("<f=a>", INTEGER, "</f>")
B = tag("<f=b>", {"type": "json_schema", "json_schema": True}, "</f>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": ","}
GENERIC = TOOL_FORMATS["generic"]


def generic_use(choice: Any, parallel: bool) -> ToolUse:
    of = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/near"}},
        "required": ["city"],
        "$defs": {"near": {"enum": [1]}},
    }
    functions = [{"name": "f", "parameters": of}, {"name": "g"}]
    tools = [{"type": "function", "function": function} for function in functions]
    return tool_use(tools, choice, parallel=parallel)


def generic_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


F = generic_call("f", '{"city": "Oslo", "near": 1}')
G = generic_call("g", "{}")
NO_CALLS = [
    generic_call("h", "{}"),
    generic_call("f", "{}"),
    generic_call("f", '{"city": "Oslo", "near": 2}'),
    generic_call("f", "[]"),
    F[:-3],
]
# tool_choice, whether calls may be parallel, whether an answer has its mark
GENERIC_CASES: list[tuple[Any, bool, bool, list[str], list[str]]] = [
    (
        "auto",
        False,
        True,
        [F, G, "<answer>", "<answer>Hi <b>\n", f"<answer>Hi\n{F}"],
        ["", "Hi", f"{F}\n{G}", f"{F} so", f" {F}", *NO_CALLS, f"<answer>Hi {NO_CALLS[0]}"],
    ),
    ("auto", True, True, [F, f"{F}\n{G}\n{F}", f"<answer>a{F}b{G}c"], [f"{F}{G}", *NO_CALLS]),
    ("auto", False, False, ["Hi", F, ""], NO_CALLS),
    ("required", True, True, [F, f"{G}\n{F}"], ["", "<answer>Hi", *NO_CALLS]),
    ("required", False, True, [F, G], ["", f"{G}\n{F}", *NO_CALLS]),
    ({"type": "function", "function": {"name": "g"}}, True, True, [G], ["", F, f"{G}\n{G}"]),
    ("none", True, True, ["<answer>Hi", f"<answer>Like {NO_CALLS[0]}"], ["", F, "Hi"]),
]
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "any_text", "excludes": ["no", "##"]}, ["", "n o\n#"], ["a no", "n##"]),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "any_text", "excludes": ["no"]},
                {"type": "const_string", "value": "!"},
            ],
        },
        ["!", "n o!"],
        ["no!", "yes"],
    ),
    ({**TRIGGERED, "excludes": ["no"]}, ["Hi", "<f>3</f> Hi"], ["no", "<f>3</f> no"]),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "optional", "content": INTEGER},
            ],
        },
        ["a", "a12"],
        ["1", "a1b"],
    ),
    (
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": "yes"},
                {"type": "regex", "pattern": "n/o+"},
            ],
        },
        ["yes", "n/oo"],
        ["n/", "yesn/o"],
    ),
    (
        {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), INTEGER]},
        ["<t>hm < x\n</t>7", "<t></t>7"],
        ["<t>x</t>x", "7", "<t>hm"],
    ),
    (
        {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), TRIGGERED]},
        ["<t>x</t>", '<t>x</t> so <f=a>3</f> or <f=b>"x"</f>.'],
        ["<f=a>3</f>", "<t>x</t><f=a>true</f>", "<t>x</t><f=c>"],
    ),
    (
        {**TRIGGERED, "at_least_one": True},
        ["<f=a>3</f>", "<f=a>3</f> and <f=a>4</f>"],
        ["", "text <f=a>3</f>"],
    ),
    ({**TRIGGERED, "stop_after_first": True}, ["text", "text <f=a>3</f>"], ["<f=a>3</f> more"]),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f=a>3</f>"],
        ["text", "<f=a>3</f> more"],
    ),
    (
        SEPARATED,
        ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>[2]</f>"],
        ["<f=a>1</f>,", "x", "<f=a>1</f><f=a>1</f>"],
    ),
    (
        {"type": "repeat", "min": 2, "max": 3, "content": INTEGER | {"json_schema": {"const": 1}}},
        ["11", "111"],
        ["1"],
    ),
    ({"type": "plus", "content": tag("(", INTEGER, [")", "]"])}, ["(1)(2]", "(1]"], ["", "(1"]),
    *(
        (generic_tag(generic_use(choice, parallel), GENERIC, has_mark=mark)["format"], good, bad)
        for choice, parallel, mark, good, bad in GENERIC_CASES
    ),
]

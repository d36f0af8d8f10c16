"""Grammars by llguidance, on the vocabulary of the bundled model: outputs under the masks are valid,
and the masks allow what is valid and nothing else."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import weft
from tests.grammar.schemas import random_schema, spoiled
from weft import LLM, Grammar, SamplingParams
from weft.config.options import SettingsError
from weft.grammar.backends import missing
from weft.grammar.choice import ChoiceCompiler
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled, Compiler, InvalidGrammar, Key
from weft.grammar.tags import as_format
from weft.server.chat.tools import ToolUse, generic_tag, strict_tag, tool_use
from weft.text.parsers.formats import TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
EOS = 0
NUM_SCHEMAS = 300
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
    matcher, mask = compiled.matcher.fork(), compiled.mask[None].copy()
    ids: list[int] = []
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        matcher.consume(token)
        assert not matcher.error
        if token == EOS or matcher.is_complete:
            return tokenizer.decode([*ids, token])
        ids.append(token)
        compiler.fill([matcher], mask)
    return None


def accepts(compiler: Compiler, tokenizer: Tokenizer, compiled: Compiled, text: str) -> bool:
    """Whether the text and then the end are allowed, token by token."""
    matcher, mask = compiled.matcher.fork(), compiled.mask[None].copy()
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


def test_everything_generated_is_valid_everything_valid_is_allowed_and_little_else(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    rng, noise = random.Random(5), np.random.default_rng(5)
    num_ended = num_wrong = num_wrong_allowed = 0
    for _ in range(NUM_SCHEMAS):
        made = random_schema(rng)
        compiled = compiler.compile(Key("json_schema", json.dumps(made.schema)))
        assert compiled.warnings == (), made.schema
        text = generated(compiler, tokenizer, compiled, noise)
        if text is not None:
            num_ended += 1
            assert is_valid(made.schema, json.loads(text)), (made.schema, text)
        for style in ({}, {"indent": 2}, {"separators": (",", ":")}):
            value = made.make()
            assert is_valid(made.schema, value), "the test is wrong"
            text = json.dumps(value, ensure_ascii=False, **style)
            assert accepts(compiler, tokenizer, compiled, text), (made.schema, text)
        value = spoiled(rng, made.make())
        if not is_valid(made.schema, value):
            num_wrong += 1
            num_wrong_allowed += accepts(
                compiler, tokenizer, compiled, json.dumps(value, ensure_ascii=False)
            )
    assert num_ended > 0.9 * NUM_SCHEMAS  # names of properties may be long
    assert num_wrong > 0.5 * NUM_SCHEMAS
    assert num_wrong_allowed <= 0.02 * num_wrong


def test_where_a_text_is_forced_the_masks_allow_only_its_tokens_so_jumps_change_nothing(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    rng, noise = random.Random(7), np.random.default_rng(7)
    num_forced = 0
    for _ in range(100):
        schema = random_schema(rng).schema
        compiled = compiler.compile(Key("json_schema", json.dumps(schema)))
        matcher, mask, due = compiled.matcher.fork(), compiled.mask[None].copy(), list[int]()
        for _ in range(150):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            due = due or matcher.fork().forced()
            assert not due or allowed == due[:1], schema
            assert due or len(allowed) != 1 or allowed == [EOS], "forced, and not said to be"
            num_forced += bool(due)
            token = due.pop(0) if due else int(noise.choice(allowed))
            matcher.consume(token)
            if token == EOS or matcher.is_complete:
                break
            compiler.fill([matcher], mask)
    assert num_forced > 500


def test_the_large_twin_allows_what_the_plain_one_does(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    """But where there is only one text: it insists on the tokens of the tokenizer."""
    vocabulary = [
        b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        for token in range(tokenizer.vocab_size)
    ]
    plain = ChoiceCompiler(vocabulary, frozenset({EOS}))
    key = Key("choice", json.dumps(["yes", "yesterday", "größe", 'a "b" (c)|d', "no"]))
    one, other = compiler.compile(key), plain.compile(key)
    assert one.mask.tolist() == other.mask.tolist()
    rng = np.random.default_rng(3)
    for _ in range(20):
        pair = [one.matcher.fork(), other.matcher.fork()]
        masks = np.stack([one.mask, other.mask])
        for _ in range(20):
            token = int(
                rng.choice(
                    np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
                )
            )
            for matcher in pair:
                matcher.consume(token)
            assert [matcher.error for matcher in pair] == ["", ""]
            if token == EOS or pair[1].is_complete:
                assert pair[0].is_complete
                break
            compiler.fill(pair[:1], masks[:1])
            plain.fill(pair[1:], masks[1:])
            is_forced = sum(word.bit_count() for word in masks[0].view(np.uint32).tolist()) == 1
            assert is_forced or masks[0].tolist() == masks[1].tolist()
            assert not (masks[0] & ~masks[1]).any()


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


@pytest.mark.parametrize(("key", "good", "bad"), KINDS)
def test_each_kind_of_grammar(
    compiler: LlgCompiler, tokenizer: Tokenizer, key: Key, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(key)
    for text in good:
        assert accepts(compiler, tokenizer, compiled, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, compiled, text), text


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}
A, B = (
    tag("<f=a>", INTEGER, "</f>"),
    tag("<f=b>", {"type": "json_schema", "json_schema": True}, "</f>"),
)
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


F, G = generic_call("f", '{"city": "Oslo", "near": 1}'), generic_call("g", "{}")
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


@pytest.mark.parametrize(("format", "good", "bad"), FORMATS)
def test_structural_tags_of_the_newer_form(
    compiler: LlgCompiler,
    tokenizer: Tokenizer,
    format: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    test_each_kind_of_grammar(
        compiler, tokenizer, Key("structural_tag", json.dumps({"format": format})), good, bad
    )


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "poem"}, "is not supported"),
        ({"type": "token", "token": 3}, "is not supported"),
        ({**TRIGGERED, "triggers": ["<g"]}, "begins with none of the triggers"),
        (
            {"type": "sequence", "elements": [TEXT, INTEGER]},
            "after any_text there must be a fixed text",
        ),
        ({"type": "sequence"}, "a format has no 'elements'"),
        (tag("(", INTEGER, 3), "must begin and end with text"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused(
    compiler: LlgCompiler, format: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(reason)):
        compiler.compile(Key("structural_tag", json.dumps({"format": format})))


def test_calls_of_strict_tools_fit_their_schemas_and_text_stays_free(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    hermes = TOOL_FORMATS["hermes"]
    assert hermes.around is not None
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    use = ToolUse(arguments={"weather": city, "news": {"type": "object"}})
    tag = strict_tag(use, hermes.mark, hermes.around)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    oslo, news = call("weather", '{"city": "Oslo"}'), call("news", '{"of": [1]}')
    good = ["No.", oslo, f"Well.\n{oslo}\n{news}"]
    bad = [
        call("weather", "{}"),
        call("weather", '{"city": "Rome"}'),
        call("poem", "{}"),
        call("news", "[]"),
    ]
    test_each_kind_of_grammar(
        compiler, tokenizer, Key("structural_tag", json.dumps(tag)), good, bad
    )


def test_calls_in_the_generic_format_have_no_white_space_that_nobody_reads(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    tag = generic_tag(generic_use("auto", True), GENERIC, has_mark=True)
    bad = [generic_call("f", '{"city": "Oslo" }'), generic_call("f", '{"city":  "Oslo"}')]
    test_each_kind_of_grammar(
        compiler, tokenizer, Key("structural_tag", json.dumps(tag)), [F, G], bad
    )


def test_a_trigger_that_is_a_special_token_is_taken_as_such(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    structures = [{"begin": "<|im_start|>f", "schema": {"type": "integer"}, "end": ""}]
    text = json.dumps({"structures": structures, "triggers": ["<|im_start|>"]})
    matcher = compiler.compile(Key("structural_tag", text)).matcher.fork()
    [start] = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    for token in [*tokenizer.encode("Hi", add_special_tokens=False), start]:
        matcher.consume(token)
    assert not matcher.error
    assert matcher.forced() == tokenizer.encode("f", add_special_tokens=False)


UNIQUE = {
    "type": "array",
    "items": {"type": "integer"},
    "uniqueItems": True,
    "contains": {"const": 1},
}


def test_what_cannot_be_enforced_is_warned_of_and_refused_if_strict(compiler: LlgCompiler) -> None:
    compiled = compiler.compile(Key("json_schema", json.dumps(UNIQUE)))
    assert all(word in " ".join(compiled.warnings) for word in ("uniqueItems", "contains"))
    with pytest.raises(
        InvalidGrammar, match="strict is set, and this cannot be enforced"
    ) as refused:
        compiler.compile(Key("json_schema", json.dumps(UNIQUE), strict=True))
    assert all(word in str(refused.value) for word in ("uniqueItems", "contains"))
    hidden = {**UNIQUE, "x-guidance": {"lenient": True}}  # a schema cannot loosen itself
    with pytest.raises(InvalidGrammar):
        compiler.compile(Key("json_schema", json.dumps(hidden), strict=True))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (Key("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Key("json_schema", "[1]"), "schema"),
        (Key("json_schema", "false"), "schema"),
        (Key("json_schema", '{"$ref": "http://example.com/x.json"}'), "does not fetch"),
        (Key("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'), "Unsatisfiable"),
        (Key("regex", "(a"), "unclosed group"),
        (Key("regex", "(?=a)b"), "look-around"),
        (Key("ebnf", "root ::= undefined"), "not found"),
        (Key("ebnf", "start: /(/"), "unclosed group"),
        (Key("poem", "x"), "there is no kind of grammar 'poem'"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    compiler: LlgCompiler, key: Key, reason: str
) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(reason)) as refused:
        compiler.compile(key)
    assert 0 < len(str(refused.value)) <= 600


@pytest.mark.skipif(not missing("xgrammar"), reason="xgrammar is installed")
@pytest.mark.parametrize(
    "key",
    [
        Key("regex", "(a?){2000}a{2000}"),
        Key("ebnf", "start: /(a?){2000}a{2000}/"),
        Key("ebnf", 'start: ("a"?){2000} ("a"){2000}'),
    ],
    ids=str,
)
def test_a_grammar_that_is_too_hard_to_follow_is_told_of_with_the_limits(
    compiler: LlgCompiler, tokenizer: Tokenizer, key: Key
) -> None:
    matcher = compiler.compile(key).matcher.fork()
    [token] = tokenizer.encode("a", add_special_tokens=False)
    assert not matcher.consume(token)
    assert "50,000 states, and 25,000 items a step, are allowed" in matcher.error


def test_a_library_that_is_not_there_is_told_of_when_the_engine_starts() -> None:
    with pytest.raises(
        SettingsError, match=re.escape("xgrammar is not installed: pip install xgrammar")
    ):
        LLM(grammar_backend="xgrammar", threads=1, kv_tokens=1_024)


def test_without_a_library_such_requests_are_refused() -> None:
    llm = LLM(grammar_backend="none", threads=1, kv_tokens=1_024)
    [output] = llm.generate(
        ["x"], [SamplingParams(max_new_tokens=9, grammar=Grammar("regex", "a+"))]
    )
    assert (output.finish_reason, output.error) == (
        "error",
        "this server was started without structured output (--grammar-backend none)",
    )


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"structures": [{}]}', '{"format": 3}'])
def test_a_structural_tag_of_neither_form_is_told_what_is_needed(text: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"a format, or structures .* and triggers are needed"):
        as_format(json.loads(text))

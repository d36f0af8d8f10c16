"""Grammars by llguidance, on the vocabulary of the bundled model: outputs under the masks are
valid, and the masks allow what is valid and nothing else."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from tests.grammar.choice import ChoiceCompiler
from tests.grammar.formats import (
    EOS,
    FORMATS,
    GENERIC,
    INTEGER,
    KINDS,
    TEXT,
    TRIGGERED,
    F,
    G,
    accepts,
    generated,
    generic_call,
    generic_use,
    is_valid,
    tag,
)
from tests.grammar.formats import compiler as compiler
from tests.grammar.formats import tokenizer as tokenizer
from tests.grammar.schemas import random_schema, spoiled
from weft import LLM, Grammar, SamplingParams
from weft.config.options import SettingsError
from weft.grammar.backends import missing
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import InvalidGrammar, Key
from weft.grammar.tags import as_format
from weft.server.chat.call_tags import free_tag, generic_tag
from weft.server.chat.tools import ToolUse
from weft.text.parsers.formats import TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

NUM_SCHEMAS = 300


def test_everything_generated_is_valid_everything_valid_is_allowed_and_little_else(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    rng = random.Random(5)
    noise = np.random.default_rng(5)
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
    rng = random.Random(7)
    noise = np.random.default_rng(7)
    num_forced = 0
    for _ in range(100):
        schema = random_schema(rng).schema
        compiled = compiler.compile(Key("json_schema", json.dumps(schema)))
        matcher = compiled.matcher.fork()
        mask = compiled.mask[None].copy()
        due = list[int]()
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
    one = compiler.compile(key)
    other = plain.compile(key)
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


@pytest.mark.parametrize(("key", "good", "bad"), KINDS)
def test_each_kind_of_grammar(
    compiler: LlgCompiler, tokenizer: Tokenizer, key: Key, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(key)
    for text in good:
        assert accepts(compiler, tokenizer, compiled, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, compiled, text), text


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
    assert hermes.forms is not None
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    use = ToolUse(
        names=frozenset(("weather", "news")),
        strict=frozenset(("weather",)),
        schemas={"weather": city, "news": {"type": "object", "properties": {}}},
    )
    tag = free_tag(use, hermes.forms)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    oslo = call("weather", '{"city": "Oslo"}')
    news = call("news", '{"of": [1]}')
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
        (Key("json_schema", '{"allOf": [{"$ref": "#"}]}'), "$ref '#' leads only back to itself"),
        (Key("json_schema", '{"$anchor": "a", "$ref": "#a"}'), "nothing matches it"),
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
    assert output.finish_reason == "error"
    assert (
        output.error == "this server was started without structured output (--grammar-backend none)"
    )


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"structures": [{}]}', '{"format": 3}'])
def test_a_structural_tag_of_neither_form_is_told_what_is_needed(text: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"a format, or structures .* and triggers are needed"):
        as_format(json.loads(text))

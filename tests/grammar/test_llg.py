"""Grammars by llguidance, on the vocabulary of the bundled model: what is generated under the masks is valid, what is
valid is allowed, what is not is not."""

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
from weft.grammar.choice import ChoiceCompiler
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled, InvalidGrammar, Key
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


def generated(compiler: LlgCompiler, tokenizer: Tokenizer, compiled: Compiled, rng: np.random.Generator) -> str | None:
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


def accepts(compiler: LlgCompiler, tokenizer: Tokenizer, compiled: Compiled, text: str) -> bool:
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
            num_wrong_allowed += accepts(compiler, tokenizer, compiled, json.dumps(value, ensure_ascii=False))
    assert num_ended > 0.95 * NUM_SCHEMAS
    assert num_wrong > 0.5 * NUM_SCHEMAS
    assert num_wrong_allowed <= 0.02 * num_wrong


def test_the_large_twin_allows_what_the_plain_one_does(compiler: LlgCompiler, tokenizer: Tokenizer) -> None:
    """But where there is only one text: it insists on the tokens that the tokenizer would make of it."""
    vocabulary = [
        b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
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
            token = int(rng.choice(np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))))
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


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (Key("regex", "[0-9]{3}-[a-f]+"), ["123-af"], ["12-a", "123-", "123-afx"]),
        (Key("ebnf", 'root ::= "a" [0-9]+ ("b" | "c")*'), ["a1", "a12bcb"], ["a", "b", "a1d"]),
        (Key("ebnf", 'start: "x" num\nnum: /[0-9]/ num | "."'), ["x.", "x12."], ["x1"]),
        (Key("json_schema", "true"), ['{"a": [1]}', "3"], ["{"]),
        (Key("json_schema", '{"type": "object"}'), ["{}", '{"a": 1}'], ["[]", "1"]),
        (
            Key(
                "structural_tag",
                '{"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}',
            ),
            ["free text", "one <f>12</f> two"],
            ["<f>x</f>", "<f>1", "<fa>"],
        ),
    ],
)
def test_each_kind_of_grammar(
    compiler: LlgCompiler, tokenizer: Tokenizer, key: Key, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(key)
    for text in good:
        assert accepts(compiler, tokenizer, compiled, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, compiled, text), text


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "contains": {"const": 1}}


def test_what_cannot_be_enforced_is_warned_of_and_refused_if_strict(compiler: LlgCompiler) -> None:
    compiled = compiler.compile(Key("json_schema", json.dumps(UNIQUE)))
    assert all(word in " ".join(compiled.warnings) for word in ("uniqueItems", "contains"))
    with pytest.raises(InvalidGrammar, match="strict is set, and this cannot be enforced") as refused:
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
def test_an_invalid_grammar_is_refused_with_the_reason(compiler: LlgCompiler, key: Key, reason: str) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(reason)) as refused:
        compiler.compile(key)
    assert 0 < len(str(refused.value)) <= 600

"""Numbers and patterns of schemas: what an answer may be is what the client wrote, or it is
named."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import weft
from tests.grammar.formats import EOS, accepts, generated
from tests.seeds import every_second, seeds
from weft.grammar.enforceable import exact_patterns, flexible_space
from weft.grammar.llg import WHITESPACE, LlgCompiler
from weft.grammar.protocol import Compiled, InvalidGrammar, Key
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
LARGE = [
    *(2**53 + step for step in (-1, 0, 1)),
    *(2**63 + step for step in (-1025, -1024, -1, 0, 1)),
    2**64,
    1180334356853624923,
    10**19,
]
INTEGERS = [*LARGE, *(-value for value in LARGE)]
FLOATS = [1e308, 1.7976931348623157e308, 3.4e38, 1e19, 5e-324, 1e-7, 0.1]
NUMBERS = [*INTEGERS, *FLOATS, *(-value for value in FLOATS), -0.0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LlgCompiler:
    return LlgCompiler(FOLDER / "tokenizer.json", tokenizer.vocab_size, [EOS])


def compiled(compiler: LlgCompiler, schema: Any, *, strict: bool = False) -> Compiled:
    return compiler.compile(Key("json_schema", json.dumps(schema), strict))


def wrapped(schema: Any) -> list[Any]:
    """The schema at the root, in an object, in an array and as one of several."""
    member = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    items = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
    return [schema, member, items, {"anyOf": [schema, member]}]


def exactly(text: str) -> Any:
    return json.loads(text, parse_float=Fraction)


def check(compiler: LlgCompiler, tokenizer: Tokenizer, schema: Any) -> None:
    """Without a warning, all that is generated is valid; with one, strict refuses the schema."""
    grammar = compiled(compiler, schema)
    if grammar.warnings:
        with pytest.raises(InvalidGrammar, match="strict is set"):
            compiled(compiler, schema, strict=True)
        return
    # As fractions, because 111133256.1 is no multiple of 0.1 in doubles.
    validator = jsonschema.Draft202012Validator(exactly(json.dumps(schema)))
    rng = np.random.default_rng(1)
    for _ in range(3):
        text = generated(compiler, tokenizer, grammar, rng)
        # A bound that excludes no double is not enforced, and huge exponents make huge fractions.
        is_long = text is None or re.search(r"e[+-]?[0-9]{3}", text, re.IGNORECASE)
        if text is not None and not is_long:
            assert validator.is_valid(exactly(text)), (schema, text)


@pytest.mark.pairs
@pytest.mark.parametrize("value", every_second(NUMBERS))
@pytest.mark.parametrize(
    "keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
@pytest.mark.parametrize("type", ["integer", "number"])
def test_a_number_of_a_keyword_is_enforced_or_named(
    compiler: LlgCompiler, tokenizer: Tokenizer, type: str, keyword: str, value: float
) -> None:
    if keyword == "multipleOf" and value <= 0:
        return
    for schema in wrapped({"type": type, keyword: value}):
        check(compiler, tokenizer, schema)


@pytest.mark.parametrize("value", every_second(NUMBERS))
def test_a_constant_is_the_literal_or_is_named(
    compiler: LlgCompiler, tokenizer: Tokenizer, value: float
) -> None:
    for schema in ({"const": value}, {"enum": [[value], "x"]}):
        for outer in wrapped(schema):
            check(compiler, tokenizer, outer)
    for schema in ({"enum": [value, "x"]}, {"const": [value]}, {"const": {"b": [value]}}):
        check(compiler, tokenizer, schema)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_a_fraction_in_a_constant_has_the_value_that_the_schema_says(
    compiler: LlgCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    """The library reads and writes some doubles with another last digit; these are named."""
    rng = np.random.default_rng(seed)
    num_named = 0
    values = [1.1, 1e2, 2.0, 0.1 + 0.2, 1e15 + 0.25, 9.160455180474817e-12, 93386465708704.12]
    for _ in range(40):
        digits = f"{rng.uniform(-10, 10):.{rng.integers(17)}f}"
        values.append(float(f"{digits}e{rng.integers(-13, 18)}"))
    for value in values:
        inner = [value, [value, 1.5], {"b": {"c": [value]}}][int(rng.integers(3))]
        schema = {"enum": [inner]} if rng.integers(2) else {"const": inner}
        for outer in wrapped(schema)[:2]:
            check(compiler, tokenizer, outer)
            num_named += bool(compiled(compiler, outer).warnings)
    assert 0 < num_named < len(values) / 3


@pytest.mark.parametrize("text", ["1.10", "1e0", "0.11e1", "110E-2"])
def test_a_literal_is_taken_by_its_value(
    compiler: LlgCompiler, tokenizer: Tokenizer, text: str
) -> None:
    value = json.loads(text)
    schema = f'{{"properties": {{"a": {{"enum": [[{text}]]}}}}, "required": ["a"]}}'
    grammar = compiler.compile(Key("json_schema", schema, strict=True))
    assert accepts(compiler, tokenizer, grammar, json.dumps({"a": [value]}).replace("1.0", "1"))
    assert not accepts(compiler, tokenizer, grammar, '{"a": [1.11]}')
    assert not accepts(compiler, tokenizer, grammar, '{"a": [11]}')


@pytest.mark.parametrize("keyword", ["minimum", "maximum"])
def test_a_bound_of_many_digits_admits_nothing_beyond_it(
    compiler: LlgCompiler, tokenizer: Tokenizer, keyword: str
) -> None:
    for value in (93386465708704.12, 40543.598127359604, 0.0009365900863540063):
        grammar = compiled(compiler, {"type": "number", keyword: value})
        step = math.ulp(value) * (4 if keyword == "maximum" else -4)
        assert accepts(compiler, tokenizer, grammar, f"{value - step:.24f}".rstrip("0"))
        for steps in (1, 2):
            outside = value + step * steps / 4
            assert not accepts(compiler, tokenizer, grammar, repr(outside)), (value, outside)


@pytest.mark.parametrize("value", INTEGERS)
def test_a_whole_number_at_the_root_has_all_its_digits(
    compiler: LlgCompiler, tokenizer: Tokenizer, value: int
) -> None:
    rng = np.random.default_rng(1)
    for schema in ({"const": value}, {"enum": [value, 7]}, {"type": "integer", "enum": [value]}):
        grammar = compiled(compiler, schema, strict=True)
        assert not grammar.warnings
        texts = {generated(compiler, tokenizer, grammar, rng) for _ in range(8)}
        assert str(value) in texts
        assert texts <= {str(value), "7"}


@pytest.mark.parametrize("value", INTEGERS)
def test_a_whole_number_between_two_tags_has_all_its_digits(
    compiler: LlgCompiler, tokenizer: Tokenizer, value: int
) -> None:
    rng = np.random.default_rng(1)
    for schema in ({"const": value}, {"enum": [value, 'a"\\b'], "title": "t"}):
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
        text = json.dumps({"format": tag})
        grammar = compiler.compile(Key("structural_tag", text, strict=True))
        assert not grammar.warnings
        texts = {generated(compiler, tokenizer, grammar, rng) for _ in range(8)}
        assert f"<a>{value}</a>" in texts
        assert texts <= {f"<a>{value}</a>", f"<a>{json.dumps(schema.get('enum', [0])[-1])}</a>"}


@pytest.mark.parametrize("value", INTEGERS)
def test_a_whole_number_in_a_constant_at_the_root_has_all_its_digits(
    compiler: LlgCompiler, tokenizer: Tokenizer, value: int
) -> None:
    rng = np.random.default_rng(1)
    values = [[value, 'a]"é'], {"b": {"c": [value, 1.1, None]}, "d": [], "e": {}}, value]
    for one in values:
        for schema in ({"const": one}, {"enum": [one, [], "x"]}):
            grammar = compiled(compiler, schema, strict=True)
            assert not grammar.warnings
            found = [generated(compiler, tokenizer, grammar, rng) for _ in range(5)]
            allowed = schema.get("enum", [one])
            assert all(json.loads(str(text)) in allowed for text in found), found
        [pattern] = exact_patterns({"const": one}, flexible_space(WHITESPACE)) or [None]
        if pattern is None:  # the library has this one exactly
            continue
        for space in (None, 1):
            assert re.fullmatch(pattern, json.dumps(one, indent=space, ensure_ascii=False))
        wrong = json.dumps(one).replace(str(value), str(value + 1))
        assert not re.fullmatch(pattern, wrong)


def test_a_compact_constant_at_the_root_has_one_space_behind_a_comma(
    compiler: LlgCompiler, tokenizer: Tokenizer
) -> None:
    value = {"a": [2**60 + 1, 2]}
    schema = {"const": value, "x-guidance": {"whitespace_flexible": False}}
    grammar = compiled(compiler, schema, strict=True)
    text = generated(compiler, tokenizer, grammar, np.random.default_rng(1))
    assert text == '{"a": [1152921504606846977, 2]}'


@pytest.mark.parametrize("text", ["1e400", "[1e400]", '{"a": [-1e400]}'])
def test_a_constant_beyond_all_doubles_is_named(compiler: LlgCompiler, text: str) -> None:
    schema = f'{{"const": {text}}}'
    grammar = compiler.compile(Key("json_schema", schema, strict=False))
    assert "a number in it has too many digits" in grammar.warnings[0]
    with pytest.raises(InvalidGrammar, match="strict is set"):
        compiler.compile(Key("json_schema", schema, strict=True))


def test_a_constant_that_is_too_long_for_a_pattern_is_named(compiler: LlgCompiler) -> None:
    grammar = compiled(compiler, {"const": [2**60 + 1] * 1_000})
    assert "a number in it has too many digits" in grammar.warnings[0]


@pytest.mark.parametrize(
    ("type", "low", "high"),
    [
        ("integer", -(2**63), 2**63 - 1),
        ("integer", 0, 2**64 - 1),
        ("number", -1.7976931348623157e308, 1.7976931348623157e308),
        ("number", -3.4e38, 3.4e38),
        ("number", 0, 1e19),
    ],
)
def test_bounds_of_a_machine_type_are_no_error(
    compiler: LlgCompiler, tokenizer: Tokenizer, type: str, low: float, high: float
) -> None:
    schema = {"type": type, "minimum": low, "maximum": high}
    grammar = compiled(compiler, schema, strict=True)
    assert not grammar.warnings
    for text in ("0", "7", "123456789", str(2**62)):
        assert accepts(compiler, tokenizer, grammar, text)
    check(compiler, tokenizer, schema)


@pytest.mark.parametrize("pattern", [r"^(?!a)b$", r"\bfoo\b", r"(a)\1", r"(?<=a)b", r"^\uD800$"])
def test_a_pattern_that_no_automaton_has_is_named(compiler: LlgCompiler, pattern: str) -> None:
    for schema in wrapped({"type": "string", "pattern": pattern}):
        grammar = compiled(compiler, schema)
        assert any("pattern" in warning for warning in grammar.warnings)
        with pytest.raises(InvalidGrammar, match="pattern"):
            compiled(compiler, schema, strict=True)
    names = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    assert compiled(compiler, names).warnings
    schema = {"type": "string", "pattern": pattern}
    content = {"type": "json_schema", "json_schema": schema}
    tag = json.dumps({"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}})
    assert compiler.compile(Key("structural_tag", tag)).warnings
    with pytest.raises(InvalidGrammar):
        compiler.compile(Key("regex", pattern))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\d{3}$", "787", "７８７"),
        (r"^\w$", "_", "é"),
        (r"^\W$", "é", "a"),
        (r"^\s$", "\u3000", "\x85"),
        (r"^\S$", "é", "\u2028"),
        (r"^[a-z&&[aeiou]]$", "&]", "a"),
        (r"^[+--]$", ",", "."),
        (r"^[[a]$", "[", "b"),
        (r"^[\w-]$", "-", "."),
        (r"^[^\d\s]$", "x", "1"),
        (r"^[\d-x]$", "-", "w"),
        (r"^[a~~b]$", "~", "c"),
        (r"^[\]\\]$", "]", "a"),
        (r"^{a}$", "{a}", "a"),
        (r"^a{,2}$", "a{,2}", "aa"),
        (r"^a{1,2}$", "aa", "aaa"),
        (r"^\uD83D\uDE00$", "😀", "x"),
        (r"^[\uD83D\uDE00-\uD83D\uDE02]$", "😁", "😃"),
        (r"^\u00e9\x41\/\-$", "éA/-", "e"),
        (r"^(?<year>\d+)$", "7", "x"),
        (r"^[^]$", "\n", "ab"),
        (r"^\p{Lu}$", "É", "é"),
        (r"^\cJ$", "\n", "J"),
        (r"^[\cI]$", "\t", "I"),
    ],
)
def test_patterns_and_regular_expressions_have_the_meaning_of_ecma_262(
    compiler: LlgCompiler, tokenizer: Tokenizer, pattern: str, right: str, wrong: str
) -> None:
    schema = compiled(compiler, {"type": "string", "pattern": pattern}, strict=True)
    regex = compiler.compile(Key("regex", pattern.removeprefix("^").removesuffix("$")))
    for text, is_right in ((right, True), (wrong, False)):
        written = json.dumps(text, ensure_ascii=False)
        assert accepts(compiler, tokenizer, schema, written) == is_right
        assert accepts(compiler, tokenizer, regex, text) == is_right


def test_free_keys_that_may_repeat_are_named(compiler: LlgCompiler) -> None:
    free = {"type": "object", "minProperties": 2}
    by_pattern = {"type": "object", "patternProperties": {"^b": {}}, "minProperties": 2}
    for schema in (free, by_pattern):
        assert any("minProperties" in one for one in compiled(compiler, schema).warnings)
        with pytest.raises(InvalidGrammar, match="minProperties"):
            compiled(compiler, schema, strict=True)
    named = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}
    for schema in ({"type": "object", **named}, {"type": "object", "minProperties": 1}):
        assert not compiled(compiler, schema, strict=True).warnings


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft/2020-12/schema#",
        "https://example.com/mine",
    ],
)
def test_a_dialect_is_no_error(compiler: LlgCompiler, tokenizer: Tokenizer, dialect: str) -> None:
    grammar = compiled(compiler, {"$schema": dialect, "type": "boolean"}, strict=True)
    assert accepts(compiler, tokenizer, grammar, "true")


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r'"\u00e9"', "é"),
        (r'"\u0041"', "A"),
        (r'"\U0001F600"', "😀"),
        (r'"a\u0022b\\"', 'a"b\\'),
        (r'"\\u0041"', r"\u0041"),
        (r"[\u0041-\u0043]", "B"),
        (r"[\u005d]", "]"),
        (r'"\u000a"', "\n"),
    ],
)
def test_escapes_of_gbnf(
    compiler: LlgCompiler, tokenizer: Tokenizer, literal: str, text: str
) -> None:
    grammar = compiler.compile(Key("ebnf", f"root ::= {literal}"))
    assert accepts(compiler, tokenizer, grammar, text)

"""Grammars by xgrammar on the vocabulary of the bundled model; skipped without that library."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.grammar.formats import EOS, FOLDER, FORMATS, KINDS, accepts, generated, is_valid
from tests.grammar.schemas import random_schema
from weft.grammar.backends import make_compiler
from weft.grammar.protocol import Compiler, InvalidGrammar, Key
from weft.grammar.sandbox import SandboxProcess
from weft.server.chat.call_tags import call_grammar
from weft.server.chat.tools import tool_use
from weft.text.parsers.formats import TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")
FILE = FOLDER / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return make_compiler("xgrammar", FILE, tokenizer.vocab_size, [EOS])


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        *KINDS,
        *(
            (Key("structural_tag", json.dumps({"format": one})), good, bad)
            for one, good, bad in FORMATS
        ),
    ],
)
def test_each_kind_of_grammar(
    compiler: Compiler, tokenizer: Tokenizer, key: Key, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(key)
    for text in good:
        assert accepts(compiler, tokenizer, compiled, text), text
    for text in bad:
        assert not accepts(compiler, tokenizer, compiled, text), text


def test_an_output_is_complete_as_soon_as_only_the_end_token_may_follow(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.compile(Key("regex", "(yes|no)!?")).matcher
    *before, last = tokenizer.encode("yes!")
    assert [matcher.consume(token) for token in before] == [True] * len(before)
    assert not matcher.is_complete, "an exclamation mark may follow"
    assert not matcher.consume(last)
    assert (matcher.is_complete, matcher.error) == (True, "")


def test_what_is_generated_parses_and_nearly_always_fits_the_schema(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    rng, noise = random.Random(5), np.random.default_rng(5)
    num_ended = num_valid = 0
    for _ in range(60):
        made = random_schema(rng, 1)
        try:
            compiled = compiler.compile(Key("json_schema", json.dumps(made.schema)))
        except InvalidGrammar:
            continue
        text = generated(compiler, tokenizer, compiled, noise)
        if text is not None:
            num_ended += 1
            num_valid += is_valid(made.schema, json.loads(text))
    assert num_ended > 40
    assert num_valid > 0.9 * num_ended


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (Key("json_schema", '{"type": "foo"}'), 'Unsupported type "foo"'),
        (Key("regex", "(a"), "parenthesis is not closed"),
        (Key("ebnf", "root ::= undefined"), 'Rule "undefined" is not defined'),
        (Key("poem", "x"), "there is no kind of grammar 'poem'"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    compiler: Compiler, key: Key, reason: str
) -> None:
    with pytest.raises(InvalidGrammar, match=reason) as refused:
        compiler.compile(key)
    assert not str(refused.value).startswith("[")


def free_call(syntax: str, definition: str, name: str) -> Key:
    """The grammar of answers with calls of a custom tool in a format of calls."""
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "query", "format": format}}
    grammar = call_grammar(tool_use([tool], None, parallel=True), TOOL_FORMATS[name], has_mark=True)
    assert grammar is not None
    return Key(grammar.kind, grammar.text)


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: "a" line+\nline: /[b-d]/ "\\n"'), ("regex", "a([b-d]\n)+")],
)
def test_grammars_of_custom_tools_hold_texts_that_stand_as_they_are(
    compiler: Compiler, tokenizer: Tokenizer, syntax: str, definition: str
) -> None:
    compiled = compiler.compile(free_call(syntax, definition, "qwen3_coder"))
    before, after = "<tool_call>\n<function=query>\n<parameter=input>\n", "\n</parameter>"
    call = f"Yes.{before}TEXT{after}\n</function>\n</tool_call>"
    for text, is_right in (("ab\nc\n", True), ("ab\n", True), ("ax\n", False), ("a", False)):
        assert accepts(compiler, tokenizer, compiled, call.replace("TEXT", text)) == is_right, text


DEFINITION = "tools[0].custom.format.grammar.definition: "


@pytest.mark.parametrize(
    ("syntax", "definition", "name", "reason"),
    [
        ("lark", "start: /a/", "hermes", "xgrammar enforces no grammar of a text inside JSON"),
        ("regex", "a", "mistral", "xgrammar enforces no grammar of a text inside JSON"),
        ("lark", "start: foo", "qwen3_coder", "Lark error"),
        ("regex", "(a", "glm45", "Regex parsing error"),
    ],
)
def test_grammars_of_custom_tools_that_cannot_be_enforced_are_refused_by_their_place(
    compiler: Compiler, syntax: str, definition: str, name: str, reason: str
) -> None:
    with pytest.raises(InvalidGrammar) as raised:
        compiler.compile(free_call(syntax, definition, name))
    assert str(raised.value).startswith(DEFINITION + reason)


def test_a_grammar_is_tried_in_a_process_of_its_own_first(tokenizer: Tokenizer) -> None:
    make: Any = partial(SandboxProcess, "xgrammar", FILE, tokenizer.vocab_size, (EOS,), 20.0)
    sandbox = make()
    try:
        sandbox.run(Key("regex", "a+"))
        with pytest.raises(InvalidGrammar, match="parenthesis"):
            sandbox.run(Key("regex", "(a"))
    finally:
        sandbox.close()

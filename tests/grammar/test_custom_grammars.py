"""Grammars of custom tools: the same texts in JSON as by themselves, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import weft
from tests.grammar.formats import accepts
from tests.grammar.weak_model import EOS, PATCH, PATCH_TOOL, SHELL
from weft.grammar.in_json import lark_in_json, regex_in_json
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import InvalidGrammar, Key
from weft.server.chat.call_tags import call_grammar, unenforced
from weft.server.chat.tools import tool_use
from weft.text.parsers.formats import TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LlgCompiler:
    return LlgCompiler(FOLDER / "tokenizer.json", tokenizer.vocab_size, [EOS])


SUM = """
start: expr
expr: NUMBER (SIGN expr)? | "(" expr ")"
SIGN: "+" | "\\\\"
%import common.NUMBER
%ignore /[ \\n]+/
"""
# A grammar, texts in it, and texts that are not.
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "patch": (
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a"b\n+x\\n\n+\n*** End Patch',
            "*** Begin Patch\n*** Delete File: ä\n*** End Patch\n",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch"],
    ),
    "recursion, a backslash, ignored space": (
        SUM,
        ["1", "(1 +\n2)", "((3))", "1\\2"],
        ["(1", "1 -2", "", "()"],
    ),
    "folded letters and ranges": (
        'start: "SELECT\\n"i ("a".."f")+',
        ["select\nabc", "SeLeCT\nf"],
        ["select", "SELECT\ng", "select\\nabc"],
    ),
    "classes": (
        'start: /[^"a\\t]+/ "\\t" /\\s\\d{2}/',
        ["b\\c\t 12", "\n\t\t34"],
        ['"\t 12', "b\t12"],
    ),
    "imports": (
        "start: ESCAPED_STRING WS WORD\n%import common (ESCAPED_STRING, WS, WORD)",
        ['"a\\"b"\n\nword', '"" x'],
        ["'a' word", '"a"word'],
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("in_json", [False, True])
def test_a_grammar_takes_the_same_texts_in_json(
    compiler: LlgCompiler, tokenizer: Tokenizer, name: str, in_json: bool
) -> None:
    definition, good, bad = GRAMMARS[name]
    grammar = lark_in_json(definition) if in_json else definition
    made = compiler.compile(Key("ebnf", grammar))
    for text in [*good, *bad]:
        written = json.dumps(text, ensure_ascii=False)[1:-1] if in_json else text
        assert accepts(compiler, tokenizer, made, written) == (text in good), text


@pytest.mark.parametrize(
    "pattern", [r"[a-z]+\n\"", r"^(?:a|b\\)*$", r".{2,3}?", r"[^\s\w]", r"\S\D", r"(?<n>\t|)x"]
)
def test_a_pattern_takes_the_same_texts_in_json(
    compiler: LlgCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    made = compiler.compile(Key("ebnf", f"start: {regex_in_json(pattern)}"))
    texts = ['ab\n"', "b\\a", "", "äö", "x", "\tx", "-", '""', "a\n", "\\-"]
    for text in texts:
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        expected = re.fullmatch(pattern.replace("(?<", "(?P<"), text) is not None
        assert accepts(compiler, tokenizer, made, written) == expected, text


@pytest.mark.parametrize(
    "definition",
    [
        "start: /a^b/",
        "start: /(?i)a/",
        "start: /a/x",
        "start: %json {}",
        "start: <[7]>",
        "start: A\nA: /a/\n%ignore A",
        'start: "\\q"',
        r"start: /a(?=b)/",
    ],
)
def test_what_has_no_form_in_json_is_refused(definition: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"support|known|ignore"):
        lark_in_json(definition)


@pytest.mark.parametrize("wrong", ["start: (", "start: foo", 'foo: "a"', 'start: "\\q"'])
def test_of_several_grammars_the_wrong_one_is_shown_without_the_rules_around_it(
    compiler: LlgCompiler, wrong: str
) -> None:
    own = {"type": "grammar", "syntax": "lark", "definition": 'start: "right"', "in_json": True}
    both = {"type": "or", "elements": [own, {**own, "definition": wrong}]}
    with pytest.raises(InvalidGrammar) as raised:
        compiler.compile(Key("structural_tag", json.dumps({"format": both})))
    message = str(raised.value)
    assert message.endswith(f"; the grammar is {wrong!r}")
    assert "\n" not in message
    assert "r1" not in message
    assert "right" not in message


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss", "pythonic"])
@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: ("), ("regex", "(a")])
def test_the_error_of_a_grammar_names_its_place(
    compiler: LlgCompiler, name: str, syntax: str, definition: str
) -> None:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    wrong = {"type": "custom", "custom": {"name": "query", "format": format}}
    use = tool_use([SHELL, PATCH_TOOL, wrong], None, parallel=True)
    grammar = call_grammar(use, TOOL_FORMATS[name], has_mark=False)
    assert grammar is not None
    place = r"^tools\[2\]\.custom\.format\.grammar\.definition: "
    with pytest.raises(InvalidGrammar, match=place):
        compiler.compile(Key(grammar.kind, grammar.text))


WRONG_SCHEMA = {"type": "object", "properties": {"a": {"type": "telepathy"}}, "required": ["a"]}


@pytest.mark.parametrize("choice", [None, "required"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "generic"])
def test_the_error_of_a_tools_schema_names_its_place(
    compiler: LlgCompiler, name: str, choice: str | None
) -> None:
    wrong = {"name": "query", "strict": True, "parameters": WRONG_SCHEMA}
    use = tool_use([SHELL, {"type": "function", "function": wrong}], choice, parallel=True)
    grammar = call_grammar(use, TOOL_FORMATS[name], has_mark=False)
    assert grammar is not None
    with pytest.raises(InvalidGrammar) as raised:
        compiler.compile(Key(grammar.kind, grammar.text))
    assert str(raised.value) == "tools[1].function.parameters: Invalid type: telepathy"


def test_only_another_constraint_leaves_a_grammar_out_with_a_warning() -> None:
    use = tool_use([SHELL, PATCH_TOOL], None, parallel=True)
    [warning] = unenforced(use, is_enforced=False)
    assert "not enforced, as another constraint is set: apply_patch" in warning
    assert unenforced(use, is_enforced=True) == ()
    assert unenforced(tool_use([SHELL], None, parallel=True), is_enforced=False) == ()


def test_a_grammar_of_a_tool_that_may_not_be_called_constrains_nothing() -> None:
    only_shell = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "shell"}],
    }
    for choice in ("none", only_shell):
        use = tool_use([SHELL, PATCH_TOOL], choice, parallel=True)
        assert call_grammar(use, TOOL_FORMATS["hermes"], has_mark=False) is None


@pytest.mark.parametrize(
    "format",
    [
        {"type": "grammar", "syntax": "lark"},
        {"type": "grammar", "syntax": "lark", "definition": 5},
        {"type": "grammar", "syntax": ["lark"], "definition": {}},
        {"type": "or", "elements": [{"type": "grammar"}, 7, None]},
    ],
)
def test_a_grammar_in_a_tag_that_is_none_is_refused_as_before(
    compiler: LlgCompiler, format: dict[str, object]
) -> None:
    with pytest.raises(InvalidGrammar, match=r"structural_tag: a format|expecting rule"):
        compiler.compile(Key("structural_tag", json.dumps({"format": format})))

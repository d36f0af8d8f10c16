"""Grammars of custom tools inside calls: whatever a weak model writes, the tool's text is in its
grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.grammar.formats import accepts
from weft.grammar.in_json import lark_in_json, regex_in_json
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled, InvalidGrammar, Key
from weft.server.chat.custom_tools import input_of
from weft.server.chat.tools import call_grammar, tool_use, unenforced
from weft.text.parsers.events import CallArguments, CallBegin
from weft.text.parsers.formats import FORCED, TOOL_FORMATS, ToolFormat
from weft.text.parsers.output import ParsedOutput
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
EOS = 0
NUM_TEXTS = 200
MAX_TOKENS = 600
# Files are added, removed, moved and changed by lines with a sign in front, as coding agents'
# patches are.
PATCH = """
start: head change+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?

change: added | removed | updated
added: "*** Add File: " path LF new_line+
removed: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? lines?
path: /(.+)/
new_line: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
lines: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
PATCH_TOOL = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}},
    },
}
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    },
}
FORCED_PATCH = {"type": "custom", "custom": {"name": "apply_patch"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LlgCompiler:
    return LlgCompiler(FOLDER / "tokenizer.json", tokenizer.vocab_size, [EOS])


def is_patch(text: str) -> bool:
    """Whether a text is a patch, read line by line without the grammar."""
    lines = text.removesuffix("\n").split("\n")
    if lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch" or len(lines) < 3:
        return False
    kind = ""
    for number, line in enumerate(lines[1:-1], start=1):
        head = re.fullmatch(r"\*\*\* (Add|Delete|Update) File: .+", line)
        if head:
            kind = head[1]
            if kind == "Add" and not lines[number + 1].startswith("+"):
                return False
        elif kind == "Add":
            if not line.startswith("+"):
                return False
        elif kind != "Update" or not re.fullmatch(
            r"\*\*\* Move to: .+|@@|@@ .+|[-+ ].*|\*\*\* End of File", line
        ):
            return False
    return bool(kind)


class WeakModel:
    """Writes random tokens that are allowed, and likes those that end lines and texts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._weights = np.ones(tokenizer.vocab_size)
        [self._line_feed] = tokenizer.encode("n", add_special_tokens=False)  # behind a backslash
        for token in range(tokenizer.vocab_size):
            text = tokenizer.token_text(token)
            if text in ("\\", "\n", '"'):
                self._weights[token] = 1_000.0
            elif text in ("</", "**", " E", "}"):
                self._weights[token] = 100.0

    def write(
        self, compiler: LlgCompiler, tokenizer: Tokenizer, grammar: Compiled, begin: str
    ) -> str | None:
        """A text that begins with `begin`; None if it has not ended in time."""
        matcher, mask = grammar.matcher.fork(), grammar.mask[None].copy()
        ids = tokenizer.encode(begin, add_special_tokens=False)
        for token in ids:
            assert mask[0, token // 32] >> (token % 32) & 1, "the grammar refuses the beginning"
            matcher.consume(token)
            compiler.fill([matcher], mask)
        for _ in range(MAX_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if EOS in allowed:
                return tokenizer.decode(ids)
            weights = self._weights[allowed]
            token = int(self._rng.choice(allowed, p=weights / weights.sum()))
            if ids and tokenizer.token_text(ids[-1]) == "\\" and self._line_feed in allowed:
                token = self._line_feed
            matcher.consume(token)
            assert not matcher.error
            ids.append(token)
            if matcher.is_complete:
                return tokenizer.decode(ids)
            compiler.fill([matcher], mask)
        return None


def compiled(compiler: LlgCompiler, tools: list[Any], choice: Any, format: ToolFormat) -> Compiled:
    use = tool_use(tools, choice, parallel=False)
    grammar = call_grammar(use, format, has_mark=False)
    assert grammar is not None
    return compiler.compile(Key(grammar.kind, grammar.text))


def inputs(text: str, format: ToolFormat) -> list[str]:
    """The texts of the calls of apply_patch in an answer."""
    parser = ParsedOutput(None, format.parser({"apply_patch", "shell"}, eager=False))
    calls: list[list[str]] = []
    for event in parser.push(text, is_last=True):
        if isinstance(event, CallBegin):
            assert event.name == "apply_patch"
            calls.append([])
        elif isinstance(event, CallArguments):
            calls[-1].append(event.text)
    return [input_of("".join(call)) for call in calls]


BEGINNINGS = {
    "hermes": '<tool_call>\n{"name": "apply_patch", "arguments":',
    "qwen3_coder": "I change it.\n<tool_call>\n<function=apply_patch>\n",
    "glm45": "<tool_call>apply_patch\n",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="apply_patch">\n',
    "generic": '<tool_call>\n{"name": "apply_patch",',
    "forced": "",
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_every_patch_of_a_weak_model_is_a_patch(
    compiler: LlgCompiler, tokenizer: Tokenizer, name: str
) -> None:
    format = FORCED if name == "forced" else TOOL_FORMATS[name]
    choice = FORCED_PATCH if name == "forced" else None
    grammar = compiled(compiler, [SHELL, PATCH_TOOL], choice, format)
    num_found = 0
    num_texts = NUM_TEXTS if name == "hermes" else NUM_TEXTS // 5
    for seed in range(num_texts):
        text = WeakModel(tokenizer, seed).write(compiler, tokenizer, grammar, BEGINNINGS[name])
        if text is None:
            continue
        for patch in inputs(text, format):
            assert is_patch(patch), patch
            num_found += 1
    assert num_found >= 0.9 * num_texts


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


def test_a_format_of_calls_without_fixed_texts_is_warned_of() -> None:
    use = tool_use([SHELL, PATCH_TOOL], None, parallel=True)
    [warning] = unenforced(
        use, TOOL_FORMATS["mistral"], call_grammar(use, TOOL_FORMATS["mistral"], has_mark=False)
    )
    assert "not enforced" in warning
    assert "apply_patch" in warning
    hermes = TOOL_FORMATS["hermes"]
    assert unenforced(use, hermes, call_grammar(use, hermes, has_mark=False)) == ()


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

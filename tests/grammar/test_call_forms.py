"""Calls of custom tools with a grammar, in every format: whatever a weak model writes, the text
that the answer's parser finds in a call is in the grammar."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers

import weft
from tests.grammar.weak_model import EOS, PATCH_TOOL, SHELL, WeakModel, inputs, is_patch
from tests.text.written_calls import CALLS, TEXTS
from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled, Key
from weft.server.chat.call_tags import call_grammar
from weft.server.chat.tools import tool_use
from weft.text.parsers.call_forms import CallList
from weft.text.parsers.formats import FORCED, TOOL_FORMATS
from weft.text.tokenizer import Tokenizer

FOLDER = Path(weft.__file__).parent / "bundled" / "weft-nano"
FORCED_PATCH = {"type": "custom", "custom": {"name": "apply_patch"}}
FORMATS = sorted(TOOL_FORMATS)
# Texts in marks of models: each becomes a special token of the second tokenizer.
MARK = re.compile(
    r"<[|｜][^<>]*[|｜]>|<\|tool_call>|<tool_call\|>|<\|\"\|>|｜DSML｜|\[[A-Z_]{4,}\]"
)
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<think>",
    "</think>",
    "<escape>",
    "<start_function_call>",
    "<end_function_call>",
    "<function_calls>",
    "</function_calls>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<function_call>",
)


class Vocabulary(NamedTuple):
    tokenizer: Tokenizer
    compiler: LlgCompiler


def vocabulary(folder: Path) -> Vocabulary:
    tokenizer = Tokenizer.load(folder)
    return Vocabulary(
        tokenizer, LlgCompiler(folder / "tokenizer.json", tokenizer.vocab_size, [EOS])
    )


@pytest.fixture(scope="module")
def plain() -> Vocabulary:
    """Without special tokens in calls."""
    return vocabulary(FOLDER)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """All marks of calls are special tokens. Other tokens are those of `plain`."""
    folder = tmp_path_factory.mktemp("special")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    texts = json.dumps([one.text for one in CALLS], ensure_ascii=False).replace('\\"', '"')
    found = sorted({*MARK.findall(texts), *TAGS, "<|python_tag|>", "<|return|>"})
    backend = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    marks = [tokenizers.AddedToken(mark, special=True, normalized=False) for mark in found]
    backend.add_special_tokens(marks)
    backend.save(str(folder / "tokenizer.json"))
    return vocabulary(folder)


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Vocabulary:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Vocabulary)
    return found


def compiled(words: Vocabulary, name: str) -> Compiled:
    format = FORCED if name == "forced" else TOOL_FORMATS[name]
    choice = FORCED_PATCH if name == "forced" else None
    use = tool_use([SHELL, PATCH_TOOL], choice, parallel=True)
    grammar = call_grammar(use, format, has_mark=False)
    assert grammar is not None
    return words.compiler.compile(Key(grammar.kind, grammar.text))


def num_allowed(words: Vocabulary, grammar: Compiled, ids: Sequence[int]) -> int:
    """The number of tokens up to the first one that the grammar refuses; -1: it takes all, and then
    the end."""
    matcher = grammar.matcher.fork()
    mask = grammar.mask[None].copy()
    for number, token in enumerate([*ids, EOS]):
        if not mask[0, token // 32] >> (token % 32) & 1:
            return -1 if token == EOS and matcher.is_complete else number
        matcher.consume(token)
        assert not matcher.error, "the mask allows what the matcher does not"
        if token != EOS and not matcher.is_complete:
            words.compiler.fill([matcher], mask)
    return -1


def ids_of(words: Vocabulary, text: str) -> list[int]:
    return words.tokenizer.encode(text, add_special_tokens=False)


def call_of(one: CallList, text: str) -> str:
    """A call of apply_patch with a text, as the list writes it."""
    arguments = one.call.arguments
    written = json.dumps(text, ensure_ascii=False)[1:-1] if arguments.in_json else text
    parts = arguments.with_text({"type": "const_string", "value": written})["elements"]
    around = [one.call.before.replace("NAME", "apply_patch").replace("NUMBER", "12")]
    around += [part["value"] for part in parts]
    return f"{one.begin}{one.open}{''.join(around)}{one.call.after}{one.end}"


PATCHES = [
    '*** Begin Patch\n*** Add File: a"b\n+x\\n \\" \'</p>\n+\n*** End Patch',
    "*** Begin Patch\n*** Update File: ä/b.py\n@@ def f[(]:\n-\tto=x\n+{}\n*** End Patch\n",
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("words", ["plain", "special"], indirect=True)
def test_a_text_of_the_grammar_comes_back_from_each_spelling_of_a_call(
    words: Vocabulary, name: str
) -> None:
    grammar = compiled(words, name)
    forms = TOOL_FORMATS[name].forms
    assert forms is not None
    for one in forms.lists:
        for patch in PATCHES:
            text = call_of(one, patch)
            assert num_allowed(words, grammar, ids_of(words, text)) == -1, text
            assert inputs(text, TOOL_FORMATS[name]) == [patch]
            if one.separator is not None:
                single = call_of(one._replace(begin="", open="", end=""), patch)
                two = text.replace(single, f"{single}{one.separator}{single}")
                assert num_allowed(words, grammar, ids_of(words, two)) == -1, two
                assert inputs(two, TOOL_FORMATS[name]) == [patch, patch]


# Spellings of calls that readers take, and grammars do not know.
OTHERS = {
    "hermes": [
        '<tool_call>{"arguments": {"input": "no"}, "name": "apply_patch"}',
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "no"}}\n</tool_call>',
    ],
    "llama3": [
        ' {"parameters": {"input": "no patch"}, "name": "apply_patch"}',
        '{"id": "1", "name": "apply_patch", "parameters": {"input": "no"}}',
        '{"name": "apply\\u005fpatch", "parameters": {"input": "no"}}',
        '\n{\n"name": "apply_patch", "parameters": {}}',
    ],
    "mistral": ['[TOOL_CALLS]{"name": "apply_patch", "arguments": {"input": "no"}}'],
    "deepseek": [
        '<｜tool▁call▁begin｜>apply_patch<｜tool▁sep｜>{"input": "no"}<｜tool▁call▁end｜>',
    ],
    "kimi_k2": ['<|tool_call_begin|>apply_patch<|tool_call_argument_begin|>{"input": "no"}'],
    "gpt_oss": [
        'to=apply_patch<|message|>{"input": "no"}',
        '\n to=functions.apply_patch<|channel|>final<|message|>{"input": "no"}',
        '<|start|>to=apply_patch<|message|>{"input": "no"}<|call|>',
        'Hi<|start|>assistant to=apply_patch<|channel|>commentary<|message|>{"input": "no"}',
        "<|channel|>analysis<|message|>Hm<|end|><|channel|>analysis to=apply_patch<|message|>{}",
    ],
    "phi4": [
        'functools [ {"name": "apply_patch", "arguments": {"input": "no"}}]',
        'functools{"name": "apply_patch", "arguments": {"input": "no"}}',
        'functools[{"arguments": {"input": "no"}, "name": "apply_patch"}]',
    ],
    "granite": [
        '[{"name": "apply_patch", "arguments": {"input": "no"}}]',
        ' [ {"arguments": {"input": "no"}, "name": "apply_patch"}]',
        '<tool_call>[{"name": "apply_patch", "arguments": {"input": "no"}}]',
    ],
    "pythonic": [
        'So [apply_patch(input="no")]',
        "[ apply_patch\n(input='no')]",
        "[shell(cmd='ls'), apply_patch('no')]",
    ],
    "qwen3_coder": ["<function=apply_patch></function>"],
}


def wrong_calls(name: str) -> list[str]:
    """Calls of apply_patch whose text is no patch."""
    found = list(OTHERS.get(name, []))
    for one in CALLS:
        if one.format == name and any(call == "f" for call, _ in one.calls):
            renamed = re.sub(
                r"(?<![A-Za-z0-9_])f(?=[\"'(:{<>|]|\n<|\[ARGS|$)", "apply_patch", one.text
            )
            if "apply_patch" in renamed:
                found.append(renamed)
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "special", "spelled"])
def test_a_call_with_another_text_cannot_be_written_in_any_spelling(
    plain: Vocabulary, special: Vocabulary, name: str, kind: str
) -> None:
    words = plain if kind == "plain" else special
    grammar = compiled(words, name)
    texts = wrong_calls(name)
    assert texts
    for text in texts:
        # With `spelled`, the characters of the marks, in tokens of plain text.
        ids = ids_of(plain if kind == "spelled" else words, text)
        assert num_allowed(words, grammar, ids) >= 0, text


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_most_text_that_is_no_call_stays_free(plain: Vocabulary, name: str, text: str) -> None:
    """What cannot be written any more begins like a call."""
    grammar = compiled(plain, name)
    allowed = num_allowed(plain, grammar, ids_of(plain, text))
    if allowed >= 0:
        forms = TOOL_FORMATS[name].forms
        assert forms is not None
        begins = tuple(one.begin for one in forms.lists if one.begin)
        begun = plain.tokenizer.decode(ids_of(plain, text)[: allowed + 1])
        assert any(mark in begun for mark in (*begins, *forms.never)) or forms.never_first


BEGINNINGS = {
    "apertus": '<|tools_prefix|>[{"apply_patch":',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "apply_patch",',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>apply_patch<｜tool▁sep｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="apply_patch">',
    "forced": "",
    "functiongemma": "<start_function_call>call:apply_patch",
    "gemma4": "<|tool_call>call:apply_patch",
    "generic": '<tool_call>\n{"name": "apply_patch",',
    "glm45": "<tool_call>apply_patch\n",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.apply_patch <|constrain|>json",
    "granite": '[{"name": "apply_patch",',
    "granite_20b": '<function_call> {"name": "apply_patch",',
    "hermes": '<tool_call>\n{"name": "apply_patch", "arguments":',
    "hunyuan_a13b": '<tool_calls>[{"name": "apply_patch",',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.apply_patch:0",
    "lfm2": "<|tool_call_start|>[apply_patch(",
    "llama3": '{"name": "apply_patch",',
    "minimax_m1": '<tool_calls>\n{"name": "apply_patch",',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="apply_patch">\n',
    "mistral": "[TOOL_CALLS]apply_patch[ARGS]",
    "olmo3": "<function_calls>\napply_patch(",
    "phi4": '<|tool_call|>{"name": "apply_patch",',
    "pythonic": "[apply_patch(",
    "qwen3_coder": "I change it.\n<tool_call>\n<function=apply_patch>\n",
    "seed_oss": "<seed:tool_call>\n<function=apply_patch>\n",
    "step3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="apply_patch">',
}


def num_texts(name: str) -> int:
    return 30 if name == "hermes" else 3


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@pytest.mark.parametrize("words", ["plain", "special"], indirect=True)
def test_every_patch_of_a_weak_model_is_a_patch(words: Vocabulary, name: str) -> None:
    format = FORCED if name == "forced" else TOOL_FORMATS[name]
    grammar = compiled(words, name)
    num_found = 0
    for seed in range(num_texts(name)):
        model = WeakModel(words.tokenizer, seed)
        text = model.write(words.compiler, words.tokenizer, grammar, BEGINNINGS[name])
        if text is None:
            continue
        for patch in inputs(text, format):
            assert is_patch(patch), patch
            num_found += 1
    assert num_found >= 0.9 * num_texts(name)

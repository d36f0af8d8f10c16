"""Lists on pages are those of the code: classes of models, types and names in GGUF files, formats
of tool calls and reasoning, fields that are ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

from weft.config.families.table import FAMILIES, GGUF_FILES
from weft.config.vision.mmproj import PROJECTORS
from weft.journal.records import VERSION, CacheFlushed, Record
from weft.server.fields.known import IGNORED
from weft.text.gguf_tokenizer import PRE_TOKENIZERS
from weft.text.parsers.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
)
from weft.weights.gguf.blocks import BLOCKS

DOCS = Path(__file__).parents[2] / "docs"
CODE = re.compile(r"`([^`]+)`")
CELL_END = re.compile(r"(?<!\\)\|")


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def row(text: str, begin: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {begin} |")]
    return found


def cells(text: str, heading: str) -> dict[str, set[str]]:
    """The names in code of the last cell in each row of a table, by that of the first cell."""
    found: dict[str, set[str]] = {}
    for line in text.split(heading)[1].split("\n\n")[0].splitlines()[2:]:
        _, first, *_, last, _ = CELL_END.split(line)
        found[first.strip(" `")] = set(CODE.findall(last))
    return found


def test_the_page_about_models_has_each_class_that_generates() -> None:
    named = set(re.findall(r"`(\w+For\w+)`", page("start/your-model.md")))
    endings = ("ForCausalLM", "ForConditionalGeneration")
    assert named == {name for name in FAMILIES if name.endswith(endings)}


def test_the_page_about_models_has_what_gguf_files_may_have() -> None:
    text = page("start/your-model.md")
    assert set(CODE.findall(row(text, "architectures"))) == set(GGUF_FILES)
    types = row(text, "types of weights").split("|")[2].partition(":")[0]
    assert {name.strip() for name in types.split(",")} == {*BLOCKS, "F16", "BF16", "F32"}
    named = set(CODE.findall(row(text, "tokenizers"))) - {"llama", "gemma4", "bert"}
    assert named <= set(PRE_TOKENIZERS)
    # Names that are left out stand for the same rules as one that is there.
    for name, rules in PRE_TOKENIZERS.items():
        assert name in named or rules in [PRE_TOKENIZERS[other] for other in named]


def test_the_page_about_models_has_each_encoder_of_gguf_files() -> None:
    shown: dict[str, set[str]] = {}
    for line in page("start/your-model.md").split("| `clip.projector_type`")[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        kinds, models = re.sub(r"\(.*?\)", "", line).strip("|").split("|")
        shown |= {kind: set(CODE.findall(models)) for kind in CODE.findall(kinds)}
    assert shown == {kind: set(one.models) for kind, one in PROJECTORS.items()}


@pytest.mark.parametrize(
    ("heading", "formats", "aliases"),
    [
        ("| format | how a call", TOOL_FORMATS, TOOL_ALIASES),
        ("| reasoning | marks", REASONING_FORMATS, REASONING_ALIASES),
    ],
    ids=("calls", "reasoning"),
)
def test_the_page_about_tools_has_each_format_with_its_other_names(
    heading: str, formats: Mapping[str, object], aliases: Mapping[str, str]
) -> None:
    expected: dict[str, set[str]] = {name: set() for name in formats}
    for alias, name in aliases.items():
        expected[name].add(alias)
    assert cells(page("guides/tools.md"), heading) == expected


def test_the_page_about_apis_has_each_field_that_is_ignored() -> None:
    listed = page("guides/apis.md").split("(`IGNORED` in the same file:")[1].split(")")[0]
    assert set(CODE.findall(listed)) == IGNORED


def test_the_page_about_journals_has_each_record_and_the_version() -> None:
    text = page("understand/journal.md")
    assert re.findall(r"format version \((\d+)\)", text) == [str(VERSION)]
    tags = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    ours = set(get_args(Record)) - {CacheFlushed}
    assert tags == {one.__struct_config__.tag for one in ours}

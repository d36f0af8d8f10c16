"""Every command of weft on a page is one that weft takes: its verb, its words, and each option for
this verb, not for another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli.completion import Tree, tree
from weft.config.options import options_of
from weft.config.server import ServerConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "")
INLINE = re.compile(r"`((?:weft|scripts/serve) [^`\n]+)`")
COMMAND = re.compile(r"^(?:\w+=\S* )*(?:\.venv/bin/)?(weft [a-z].*|scripts/serve .*)$")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
# Programs after which a line speaks of something else.
ENDS = re.compile(r"\s#\s|\s▸|\s\||\s&&|;\s| -- |\.\.\. ")
OF_ALL = {"help", "config"}


@pytest.fixture(scope="module")
def nodes() -> Tree:
    return tree()


def commands(page: Path) -> Iterator[str]:
    text = page.read_text("utf-8")
    blocks = [block for language, block in FENCE.findall(text) if language in SHELLS]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(ENDS.split(line.strip())[0]):
                yield found[1]
    for inline in INLINE.findall(FENCE.sub("", text)):
        yield ENDS.split(inline)[0]


def fault(command: str, nodes: Tree) -> str:
    """What is wrong with a command, or ""."""
    words = command.split()
    words[:1] = ["serve"] if words[0] == "scripts/serve" else []
    path: tuple[str, ...] = ()
    for word in words:
        if (*path, word) not in nodes:
            break
        path = (*path, word)
    if not path:
        return "" if words[0].isupper() or words[0].startswith("-") else f"{command}: no such verb"
    rest = words[len(path) :]
    is_word = bool(rest) and rest[0].isalpha() and rest[0].islower()
    if nodes[path].words and is_word and rest[0] not in nodes[path].words:
        return f"{command}: {' '.join(path)} has no {rest[0]}"
    if not nodes[path].options:
        return ""
    known = {name.removeprefix("--") for name in nodes[path].options} | OF_ALL
    taken = {name.replace("_", "-") for one in options_of(ServerConfig) for name in one.aliases}
    for name in OPTION.findall(command):
        if name not in known | taken and name.removeprefix("no-") not in known:
            return f"{command}: {' '.join(path)} has no --{name}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_are_those_of_weft(page: Path, nodes: Tree) -> None:
    assert [wrong for one in commands(page) if (wrong := fault(one, nodes))] == []


def test_a_wrong_command_is_noticed(nodes: Tree, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`weft bench nothing`, `weft bench offline --wrkload w1` and `weft srve x`\n"
        "```sh\nweft serve weft-nano --port 1   # weft chat --none\n"
        "A=b weft chat --kv-toknes 1\n```\n",
        "utf-8",
    )
    assert [fault(one, nodes) for one in commands(page)] == [
        "",
        "weft chat --kv-toknes 1: chat has no --kv-toknes",
        "weft bench nothing: bench has no nothing",
        "weft bench offline --wrkload w1: bench offline has no --wrkload",
        "weft srve x: no such verb",
    ]

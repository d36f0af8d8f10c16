"""docs/guides/coming.md: what it says of weft is there, and weft itself says so where an option of
another engine is typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.cli.main import VERBS
from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.options import NEEDLESS, Command, SettingsError, options_of
from weft.config.server import ServerConfig
from weft.config.several import ModelsConfig
from weft.server.app import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "coming.md").read_text("utf-8")
CONFIGS = (EngineConfig, ServerConfig, ModelsConfig, Limits)
SERVE = Command("weft serve", "", *CONFIGS, positional="model")
OPTIONS = {option.flag: option for config in CONFIGS for option in options_of(config)}
TAKEN = {
    *OPTIONS,
    *(f"--{alias.replace('_', '-')}" for one in OPTIONS.values() for alias in one.aliases),
}
ROWS = [
    (cells[0], cells[1])
    for line in PAGE.splitlines()
    if line.startswith("| `") and len(cells := line.strip("| ").split(" | ")) == 2
]
LONG = re.compile(r"--[a-z][a-z-]+")
FOREIGN = [(left, right) for left, right in ROWS if LONG.search(left)]
NOT_THERE = {"/api/create", "/api/push", "/completion", "/slots", "/props"}


def weft_options(cell: str) -> set[str]:
    """The options in a cell, a negated switch by its name."""
    return {re.sub("^--no-", "--", flag) for flag in LONG.findall(cell)}


def test_there_are_tables_of_four_engines() -> None:
    assert PAGE.count("\n## ") == 4
    assert len(ROWS) > 70


@pytest.mark.parametrize(("left", "right"), ROWS)
def test_a_row_names_what_weft_has(left: str, right: str) -> None:
    assert weft_options(right) <= OPTIONS.keys()
    for verb in re.findall(r"weft ([a-z]+)", right):
        assert verb in VERBS


@pytest.mark.parametrize(("left", "right"), FOREIGN)
def test_weft_answers_the_options_of_others_as_the_page_does(left: str, right: str) -> None:
    for flag in LONG.findall(left):
        if flag in ("--model-path", "--grammar"):
            continue  # of a whole command, and of a request
        if right.startswith("the same"):
            assert flag in TAKEN
            continue
        if flag in OPTIONS:
            continue  # it is taken, and the row says what else is to be said
        with pytest.raises(SettingsError) as refused:
            SERVE.read([flag, "1"], {})
        named = set(LONG.findall(str(refused.value))) - {flag}
        if flag[2:].replace("-", "_") not in NEEDLESS:
            assert named & set(LONG.findall(right)), str(refused.value)


def test_routes_are_there_or_said_to_be_missing() -> None:
    paths = {operation.path for operation in OPERATIONS}
    named = set(re.findall(r"`(?:[A-Z]+ )?(/[a-z0-9_/-]+)`", PAGE))
    assert named - paths == NOT_THERE

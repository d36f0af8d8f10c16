"""docs/guides/troubleshooting.md has messages that weft gives, and a row for each status that it
answers with; docs/reference/errors.md has all texts (test_pages.py compares it with the code)."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text("utf-8")
ALL_TEXTS = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
STATUS = re.compile(r"(?:ApiError\(|status=)\s*([45]\d\d)\b")
# Made by functions that take the texts in parts.
IN_PARTS = {
    "there is no command ...",
    "unknown option ...",
    "... is ...; a whole number is expected",
}


@pytest.fixture(scope="module")
def errors() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs" / "generate"))
    try:
        return importlib.import_module("errors")
    finally:
        sys.path.pop(0)


def cells(page: str) -> set[str]:
    """The first cells of the page of all texts, or of a part of it."""
    return set(re.findall(r"^\| (.*) \| `.*\|$", page, re.MULTILINE))


def rows(heading: str) -> list[str]:
    """The first cells of the table below a heading."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [line.removeprefix("| ").split(" | ")[0] for line in lines[1:]]


@pytest.mark.parametrize(
    "heading", ["weft does not start", "A request is refused", "A request ends, or waits"]
)
def test_messages_on_the_page_are_those_of_the_code(errors: ModuleType, heading: str) -> None:
    messages = set(rows(heading)) - IN_PARTS
    assert len(messages) > 8
    assert {errors._cell(one) for one in messages} - cells(ALL_TEXTS) == set()


def test_each_end_of_an_engine_has_a_row(errors: ModuleType) -> None:
    (engine, _) = errors.GROUPS_OF_ENDS
    found = cells(ALL_TEXTS.split(f"\n### {engine.title}\n")[1].split("\n### ")[0])
    assert len(found) > 10
    assert found <= {errors._cell(one) for one in rows("A request ends, or waits")}


def test_each_status_has_a_row() -> None:
    answered = {
        status
        for path in (ROOT / "weft").rglob("*.py")
        for status in STATUS.findall(path.read_text("utf-8"))
    }
    assert len(answered) > 10
    assert answered <= set(rows("The status says it"))


def test_texts_are_found_in_every_form(errors: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(
        "class Own(SettingsError): pass\n"
        'FULL = Own("it is full")\n'
        'def _why(port: int) -> str: return f"port {port} is taken"\n'
        "def listen(port: int) -> None: raise Own(_why(port))\n"
        "def wrong(name: str) -> Own:\n"
        '    return Own(f"{name} is wrong " f"here")\n'
        "def work(name: str) -> None:\n"
        '    message = f"no {name} is there"\n'
        "    raise ApiError(404, message, param=name)\n"
        '    message = "it is too long"\n'
        "    raise ApiError(413, message)\n"
        "def explain_exit(status: int) -> str:\n"
        '    return f"it ended with {status}"\n',
        "utf-8",
    )
    commands = errors.texts(tmp_path, errors.OF_COMMANDS)
    assert [one.text for one in commands] == [
        "it is full",
        "port ... is taken",
        "... is wrong here",
    ]
    assert errors.texts(tmp_path, errors.OF_REQUESTS) == [
        ("no ... is there", (404,), "part"),
        ("it is too long", (413,), "part"),
    ]
    assert errors.texts(tmp_path, errors.OF_ENDS) == [("it ended with ...", (), "part")]


def test_a_module_without_a_group_is_named(errors: ModuleType) -> None:
    lost = errors.ErrorText("it is lost", (), "nowhere/part")
    with pytest.raises(ValueError, match="nowhere/part is in no group"):
        errors._group_of(lost, errors.GROUPS_OF_COMMANDS)

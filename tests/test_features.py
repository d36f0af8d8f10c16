"""docs/features.md against the tree: every item has its row, and what the rows name is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "features.md"

SECTIONS = {"S": 13, "P": 7, "B": 5, "M": 6, "R": 6, "Q": 7, "X": 2, "K": 36}
WHOLE = ("C", "D", "O")  # sections without numbers
NUM_ITEMS = 266
STATES = ("works", "partly: ", "not yet", "not a feature")

PLACE = re.compile(
    r"(?:weft|tests|docs|training|scripts)/[\w./-]+(?:::[\w.]+)?|[\w-]+\.(?:md|toml|txt)"
)
RANGE = re.compile(r"(\d+)-(\d+)|(\d+)")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def rows() -> list[list[str]]:
    """The rows of the tables with five columns, without their headers."""
    found = [cells(line) for line in TABLE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return [row for row in found if len(row) == 5 and row[0] != "item"]


def items(cell: str) -> set[str]:
    """The items that a first cell names: "5-7, 9" is 5, 6, 7 and 9; the rest is taken as it is."""
    found: set[str] = set()
    for part in cell.split(", "):
        match = RANGE.fullmatch(part)
        if match is None:
            found.add(part.split(" ")[0])
            continue
        first, last, single = match.groups()
        found |= {str(n) for n in range(int(first or single), int(last or single) + 1)}
    return found


def places(text: str) -> set[str]:
    return {quoted for quoted in re.findall(r"`([^`]+)`", text) if PLACE.fullmatch(quoted)}


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def is_there(place: str) -> bool:
    path, _, name = place.partition("::")
    if not (ROOT / path).exists():
        return False
    if path.startswith("tests/") and name:
        return f"def {name}(" in text_of(path)
    definition = r"(?m)^\s*(?:(?:async )?def |class |self\.)?{}\b\s*[(:=]"
    return all(
        re.search(definition.format(re.escape(part)), text_of(path))
        for part in name.split(".")
        if part
    )


def test_every_item_has_a_row() -> None:
    wanted = {f"{section}{n}" for section, last in SECTIONS.items() for n in range(1, last + 1)}
    wanted |= {*WHOLE, *(str(n) for n in range(1, NUM_ITEMS + 1))}
    named = {item for row in rows() for item in items(row[0])}
    assert not wanted - named
    assert not {item for item in named if item.isdecimal()} - wanted


def test_every_place_that_is_named_exists() -> None:
    named = places(TABLE.read_text("utf-8"))
    assert len(named) > 100
    assert not sorted(place for place in named if not is_there(place))


def test_every_row_has_a_state_and_what_works_has_a_test() -> None:
    for item, _, where, test, state in rows():
        assert state.startswith(STATES), item
        if state == "works":
            assert any(place.startswith("tests/") for place in places(test)), item
        if state.startswith(("works", "partly")):
            assert places(where), item


@pytest.mark.parametrize(
    "place",
    [
        "weft/none.py",
        "weft/engine/loop.py::Loop.none",
        "tests/test_features.py::test_that_is_not_there",
        "weft/engine/loop.py::deque",
    ],
)
def test_a_place_that_is_not_there_is_found_out(place: str) -> None:
    assert PLACE.fullmatch(place)
    assert not is_there(place)


def test_ranges_of_items_are_understood() -> None:
    assert items("5-7, 9") == {"5", "6", "7", "9"}
    assert items("C flush_cache") == {"C"}
    assert items("K16b") == {"K16b"}

"""The READMEs of the large folders: one screen each, with the same headings, and every file that
they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = sorted((ROOT / "weft").glob("*/README.md"))
HEADINGS = [
    "Where weft differs",
    "Core and options",
    "Where to begin",
    "Invariants and their tests",
]
A_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:\.(?:py|h|cpp)|/))`")
MAX_LINES = 52


def test_the_large_folders_have_one() -> None:
    assert len(READMES) == 16


@pytest.mark.parametrize("page", READMES, ids=[page.parent.name for page in READMES])
def test_names_files_that_exist(page: Path) -> None:
    roots = (page.parent, ROOT / "weft", ROOT)
    named = A_FILE.findall(page.read_text("utf-8"))
    assert len(named) > 10
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert missing == []


@pytest.mark.parametrize("page", READMES, ids=[page.parent.name for page in READMES])
def test_names_everything_at_the_top_of_a_small_screen(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith(f"# {page.parent.name}: ")
    assert "not know" in text
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading.partition(",")[0].partition(" from ")[0] for heading in headings] == HEADINGS
    assert len(text.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("page", READMES, ids=[page.parent.name for page in READMES])
def test_every_file_and_folder_inside_is_named(page: Path) -> None:
    text = page.read_text("utf-8")
    inside = [f"`{path.parent.name}/" for path in page.parent.glob("*/__init__.py")]
    files = [f"`{path.name}`" for path in page.parent.glob("*.py") if path.name != "__init__.py"]
    assert [name for name in inside + files if name not in text] == []

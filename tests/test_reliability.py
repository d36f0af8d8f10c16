"""docs/reliability.md against the tests: each case has a test with its number, and each such test its case."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+) \| .* \|$", re.MULTILINE)


def test_each_case_names_tests_with_its_number_that_exist() -> None:
    rows = [match for match in ROW.finditer((ROOT / "docs" / "reliability.md").read_text("utf-8"))]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[0])
        assert named, f"case {row[1]}"
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text("utf-8"), name
        assert any(f"_case_{int(row[1]):02}_" in name for _, name in named), f"case {row[1]}"


def test_each_test_of_a_case_has_a_row() -> None:
    told = {
        int(match[1])
        for match in ROW.finditer((ROOT / "docs" / "reliability.md").read_text("utf-8"))
    }
    tested = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"def test_case_(\d+)_", path.read_text("utf-8"))
    }
    assert tested <= told

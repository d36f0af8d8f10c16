"""docs/contribute/kv-group.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "kv-group.md"
TEST = "tests/scheduler/test_encoded.py"


def test_the_page_makes_a_group_that_works_and_touches_one_file(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert touched == ["weft/scheduler/groups/kinds/encoded.py", TEST]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST, imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

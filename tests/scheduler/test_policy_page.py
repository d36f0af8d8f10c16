"""docs/contribute/policy.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "policy.md"
TEST = "tests/scheduler/test_least_memory.py"


def test_the_page_makes_a_policy_that_works_and_touches_one_file(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert touched == ["weft/scheduler/policies/kinds/least_memory.py", TEST]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    of_all = "tests/scheduler/test_policies.py"
    names = ("-k", "least or every_import")
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST, imports, of_all, *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

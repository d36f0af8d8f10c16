"""docs/contribute/pass.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "pass.md"
TEST = "tests/executor/test_long_steps.py"


def test_the_page_makes_a_pass_that_works_and_touches_two_files(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert touched == [
        "weft/executor/profile/long_steps.py",
        "weft/executor/build.py",
        TEST,
    ]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST, imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

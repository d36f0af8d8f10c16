"""docs/contribute/request-field.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "request-field.md"
TEST = "tests/server/test_never_waits.py"


def test_the_page_makes_a_field_that_works_and_touches_three_files(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert touched == [
        "weft/messages/requests.py",
        "weft/server/requests.py",
        "weft/scheduler/scheduler.py",
        TEST,
    ]
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

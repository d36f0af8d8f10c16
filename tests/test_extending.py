"""docs/contribute/control-request.md, followed: its blocks are put into a copy of the tree, and what they make is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import BLOCK, CONTRIBUTE, copy_tree, follow, patched, run

PAGE = CONTRIBUTE / "control-request.md"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_tree(tmp_path)
    return tmp_path


def test_the_page_makes_a_control_request_that_works(tree: Path) -> None:
    follow(PAGE, tree)
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tree, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_check_model.py", imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_page_edits_three_files_and_adds_none_but_its_test() -> None:
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    edited = [path for kind, path, _ in blocks if kind == "diff"]
    added = [path for kind, path, _ in blocks if kind == "python"]
    assert len(set(edited)) == len(edited) == 3
    assert added == ["tests/test_check_model.py"]


def test_a_message_without_its_handler_stops_the_start(tree: Path) -> None:
    follow(PAGE, tree, without="weft/engine/control/handlers.py")
    done = run(tree, "-c", "import weft.engine.control.handlers")
    assert done.returncode == 1
    assert done.stderr.endswith("IncompleteTable: messages without a handler: CheckModel\n")


def test_a_page_that_is_behind_the_code_is_found_out() -> None:
    hunk = " ROUTES = (\n+    new,\n"
    assert patched("ROUTES = (\n    a,\n)\n", hunk, "x") == "ROUTES = (\n    new,\n    a,\n)\n"
    for text in ("ALL_ROUTES = (\n", "ROUTES = (\n)\nROUTES = (\n", "  ROUTES = (\n"):
        with pytest.raises(AssertionError, match="has changed"):
            patched(text, hunk, "x")

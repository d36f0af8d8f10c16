"""docs/contribute/attention-backend.md, followed in a copy of the tree."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "attention-backend.md"
TEST = "tests/executor/test_gather_attention.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy_tree(tmp_path)
    return tmp_path


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
def test_the_page_makes_a_backend_that_works_and_touches_two_files(tree: Path) -> None:
    touched = follow(PAGE, tree)
    assert [path for path in touched if path != TEST] == [
        "weft/executor/gpu/gather_attention.py",
        "weft/config/engine.py",
    ]
    options = ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tree, "-m", "pytest", *options, TEST, imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_command_line_names_the_backends_that_there_are(tree: Path) -> None:
    follow(PAGE, tree)
    done = run(tree, "-m", "weft", "serve", "--attention-backend", "gathers")
    assert done.returncode != 0
    assert "one of auto, torch, triton, gather is expected; did you mean gather?" in done.stderr

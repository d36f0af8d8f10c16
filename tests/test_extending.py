"""docs/contribute/control-request.md, followed: its blocks are put into a copy of the tree, and what they make is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contribute" / "control-request.md"
BLOCK = re.compile(r"^```(python|diff) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of everything that is Python here."""
    for name in ("weft", "tests"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", "bundled", "e2e"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def follow(tree: Path, *, without: str = "") -> None:
    """Do what the page says, but for the file `without`."""
    for kind, path, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if path == without:
            continue
        file = tree / path
        if kind == "python":
            assert not file.exists(), f"{path} is there already"
            file.write_text(text, "utf-8")
        else:
            for hunk in text.split("@@\n")[1:]:
                file.write_text(patched(file.read_text("utf-8"), hunk, path), "utf-8")


def patched(text: str, hunk: str, path: str) -> str:
    """`text` with a hunk of a diff applied, whose old lines stand in it exactly once."""
    lines = hunk.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    assert f"\n{text}".count(f"\n{old}") == 1, (
        f"{path} has changed, and docs/contribute/control-request.md has not: {old!r}"
    )
    return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_the_page_makes_a_control_request_that_works(tree: Path) -> None:
    follow(tree)
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
    follow(tree, without="weft/engine/control/handlers.py")
    done = run(tree, "-c", "import weft.engine.control.handlers")
    assert done.returncode == 1
    assert done.stderr.endswith("IncompleteTable: messages without a handler: CheckModel\n")


def test_a_page_that_is_behind_the_code_is_found_out() -> None:
    hunk = " ROUTES = (\n+    new,\n"
    assert patched("ROUTES = (\n    a,\n)\n", hunk, "x") == "ROUTES = (\n    new,\n    a,\n)\n"
    for text in ("ALL_ROUTES = (\n", "ROUTES = (\n)\nROUTES = (\n", "  ROUTES = (\n"):
        with pytest.raises(AssertionError, match="has changed"):
            patched(text, hunk, "x")

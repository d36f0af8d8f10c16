"""docs/contribute/adapter-kind.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "adapter-kind.md"
KIND = "weft/executor/lora/kinds/loha.py"
TEST = "tests/executor/lora/test_loha.py"


def test_one_file_makes_a_kind_that_computes_what_its_formula_says(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    assert follow(PAGE, tmp_path) == [KIND, TEST]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST, imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_without_the_file_the_kind_is_refused_by_name(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    follow(PAGE, tmp_path, without=KIND)
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST)
    assert "peft_type is LOHA; only LORA is supported" in done.stdout

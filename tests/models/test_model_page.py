"""docs/contribute/model.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "model.md"
REFERENCE = "tests/models/many.py"


def test_the_page_makes_a_model_that_computes_what_transformers_does(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert [path for path in touched if path != REFERENCE] == [
        "weft/config/families/jais.py",
        "weft/config/families/table.py",
    ]
    tests = ("tests/models/test_many_families.py", "tests/models/test_registry.py")
    imports = "tests/test_imports.py::test_every_import_goes_down"
    chosen = ("-k", "jais2 or readable or every_import")
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", *tests, imports, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

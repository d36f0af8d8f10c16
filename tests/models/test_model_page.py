"""docs/contribute/model.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "model.md"
REFERENCES = ["tests/models/many.py", "tests/executor/gguf_models.py"]


def test_one_file_makes_a_model_that_computes_what_transformers_does(tmp_path: Path) -> None:
    """Also from a GGUF file."""
    copy_tree(tmp_path)
    assert follow(PAGE, tmp_path) == ["weft/config/families/jais.py", *REFERENCES]
    tests = (
        "tests/models/test_many_families.py",
        "tests/models/test_registry.py",
        "tests/executor/test_gguf_model.py",
    )
    imports = "tests/test_imports.py::test_every_import_goes_down"
    chosen = ("-k", "jais2 or readable or every_import")
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", *tests, imports, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

"""docs/contribute/sampling-feature.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.pages import CONTRIBUTE, copy_tree, follow, run

PAGE = CONTRIBUTE / "sampling-feature.md"
TEST = "tests/scheduler/test_forbid_repeat.py"


def test_the_page_makes_a_sampling_feature_that_works_and_touches_six_files(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    touched = follow(PAGE, tmp_path)
    assert [path for path in touched if path != TEST] == [
        "weft/messages/sampling.py",
        "weft/server/fields/sampling.py",
        "weft/plan/logits.py",
        "weft/scheduler/features/forbid_repeat.py",
        "weft/scheduler/features/registry.py",
        "weft/executor/sampler.py",
    ]
    imports = "tests/test_imports.py::test_every_import_goes_down"
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", TEST, imports)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

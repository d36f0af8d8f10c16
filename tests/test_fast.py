"""Which files `scripts/test --fast` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.fast import (
    BUDGET_S,
    LONG_S,
    changed_files,
    choose,
    imported_names,
    module_of,
    naming,
)

SOURCES = {
    "tests/helper.py": "from weft.memory import radix",
    "tests/test_direct.py": "import weft.memory.radix",
    "tests/test_through_a_helper.py": "def f():\n    from tests.helper import tree",
    "tests/test_of_a_name.py": "from weft.memory.radix import RadixTree",
    "tests/test_other.py": "from weft.memory import allocator",
}
IMPORTS = {file: imported_names(source) for file, source in SOURCES.items()}


def test_tests_that_import_what_changed_run_also_through_helpers() -> None:
    assert naming({"weft/memory/radix.py"}, IMPORTS) == {
        *("tests/test_direct.py", "tests/test_through_a_helper.py", "tests/test_of_a_name.py")
    }


def test_a_changed_test_runs_and_a_changed_page_affects_none() -> None:
    changed = {"tests/test_other.py", "docs/index.md", "tests/durations.json"}
    assert naming(changed, IMPORTS) == {"tests/test_other.py"}


def test_the_file_of_a_package_is_named_by_its_folder() -> None:
    assert module_of("weft/memory/__init__.py") == "weft.memory"
    assert module_of("weft/memory/radix.py") == "weft.memory.radix"


def test_what_an_edit_affects_runs_before_the_core_and_all_within_the_budget() -> None:
    durations = {"large.py": BUDGET_S, "affected.py": BUDGET_S - 2.0, "core.py": 2.5}
    chosen, left_out = choose(["core.py", "short.py"], ["large.py", "affected.py"], durations)
    assert chosen == ["affected.py", "short.py"]
    assert left_out == ["large.py", "core.py"]


def test_a_long_file_of_the_core_runs_only_if_affected() -> None:
    durations = {"long.py": LONG_S + 1.0}
    assert choose(["long.py"], [], durations) == ([], [])
    assert choose(["long.py"], ["long.py"], durations) == (["long.py"], [])


def test_changes_are_counted_from_where_the_branch_left_main(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", name)
        git("commit", "-m", name)

    git("init", "-b", "main")
    write("before.py", "")
    write("gone.py", "")
    git("checkout", "-b", "branch")
    write("committed.py", "")
    git("rm", "gone.py")
    git("checkout", "main")
    write("mains.py", "")
    git("checkout", "branch")
    (tmp_path / "before.py").write_text("changed = 1")
    (tmp_path / "new.py").touch()
    assert changed_files(tmp_path, "main") == {"committed.py", "before.py", "new.py"}
    assert changed_files(tmp_path, "no_such_branch") == {"before.py", "new.py"}

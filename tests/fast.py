"""Prints the test files that `scripts/test --fast` runs: the core, which starts no server and loads
no model, and what names a module that has changed since main.

    python -m tests.fast [--base BRANCH]
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.durations import ROOT, read_durations

LAWS = ("shape", "test_imports.py")  # any edit may break them
CORE = ("config", "memory", "messages", "scheduler")
LONG_S = 3.0  # a file of the core that takes longer runs only if what it names has changed
BUDGET_S = 100.0  # seconds of a processor for tests, of which two run at a time


def changed_files(root: Path, base: str) -> set[str]:
    """Files that differ from where this branch left `base`, also those that git does not track
    yet."""
    start = _git(root, "merge-base", "HEAD", base)
    lines = _git(root, "diff", "--name-only", "--diff-filter=d", start[0] if start else "HEAD")
    return {*lines, *_git(root, "ls-files", "--others", "--exclude-standard")}


def _git(root: Path, *args: str) -> list[str]:
    ran = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    return ran.stdout.splitlines()


def imported_names(source: str) -> set[str]:
    """All that an absolute import of a file may mean: `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def module_of(file: str) -> str:
    """The name by which `weft/a/b.py` is imported, `weft.a.b`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def naming(changed: Iterable[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Files of tests that changed, or import what changed, by themselves or through helpers beside
    the tests.

    Args:
        changed: files of the repository.
        imports: what each file of tests imports.
    """
    found = set(changed) & set(imports)
    modules = {module_of(file) for file in changed if file.endswith(".py")}
    while True:
        more = {file for file, names in imports.items() if names & modules} - found
        if not more:
            return {file for file in found if Path(file).name.startswith("test_")}
        found |= more
        modules |= {module_of(file) for file in more}


def choose(
    core: Iterable[str], affected: Iterable[str], durations: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """The files to run and those that no time is left for, each shortest first. What an edit
    affects comes before the rest of the core."""
    chosen: list[str] = []
    left_out: list[str] = []
    spent_s = 0.0

    def seconds(file: str) -> float:
        return durations.get(file, 0.0)

    affected = sorted(affected, key=lambda file: (seconds(file), file))
    rest = {file for file in core if seconds(file) <= LONG_S}.difference(affected)
    for file in (*affected, *sorted(rest, key=lambda file: (seconds(file), file))):
        if spent_s + seconds(file) > BUDGET_S:
            left_out.append(file)
            continue
        chosen.append(file)
        spent_s += seconds(file)
    return chosen, left_out


def main() -> None:
    """Print the chosen files, one a line; on stderr, those that no time is left for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main", help="branch that the changes are counted from")
    args = parser.parse_args()
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "tests").rglob("*.py")
    }
    tests = [file for file in sources if Path(file).name.startswith("test_")]
    core = [file for file in tests if file.split("/")[1] in CORE]
    imports = {file: imported_names(text) for file, text in sources.items()}
    laws = {file for file in tests if file.split("/")[1] in LAWS}
    affected = naming(changed_files(ROOT, args.base), imports) | laws
    chosen, left_out = choose(core, affected, read_durations())
    for file in left_out:
        print(f"not run, for it takes too long: {file}", file=sys.stderr)
    print("\n".join(chosen))


if __name__ == "__main__":
    main()

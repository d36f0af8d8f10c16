"""Tests are code that is read as well: the limits here are today's figures, and may only fall."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.shape.measure import ROOT, lines_of_folder, parsed, walk

TESTS = ROOT / "tests"
MAX_LONG_LINES = 158  # texts that cannot be broken without changing them
MAX_TOKENS_PER_LINE = 9.65
MAX_UNTYPED_MODULES = 145  # whose errors mypy does not show (pyproject.toml)
# Imports in the text of a page or of a program that a test writes.
IMPORT = re.compile(r"^\s*(?:from|import) +((?:tests\.[\w.]*|\.)\btest_\w+)", re.MULTILINE)
# Without it a file need not be read closely.
TRACE = re.compile(r"^\s*test_\w+(?: as \w+)?,|\b(?:from|import)\b.*\btest_", re.MULTILINE)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, wherever it does, and the names after `from`."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from IMPORT.findall(node.value)


def is_test_module(name: str) -> bool:
    """Whether a module of tests is imported, or a name in one."""
    parts = name.split(".")
    return parts[0] in ("tests", "") and any(part.startswith("test_") for part in parts)


def test_what_tests_share_is_in_modules_without_tests() -> None:
    """Whoever imports from a test module depends on all that it needs, and moves with it."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__) and TRACE.search(path.read_text("utf-8"))
        for name in imports_of(parsed(path))
        if is_test_module(name)
    ]
    for path in sorted((ROOT / "docs").rglob("*.md")):
        found += [f"{path.relative_to(ROOT)}: {name}" for name in IMPORT.findall(path.read_text())]
    assert not found, "\n".join(found)


def test_imports_from_test_modules_are_found() -> None:
    for source in (
        "from tests.a.test_b import c",
        "from tests.a import test_b",
        "def f():\n    import tests.test_b",
        "PROGRAM = '''\n    from tests.a.test_b import c\n'''",
        "from tests.a import (\n    b,\n    test_c,\n)",
    ):
        assert any(map(is_test_module, imports_of(ast.parse(source)))), source
        assert TRACE.search(source), source
    for source in ("import tests.a.helpers as test_helpers", "from weft.a import test_b"):
        assert not any(map(is_test_module, imports_of(ast.parse(source)))), source


def test_lines_of_tests_are_no_longer_and_no_denser_than_they_were() -> None:
    density = lines_of_folder(TESTS)
    assert density.long_lines <= MAX_LONG_LINES
    assert density.tokens_per_line <= MAX_TOKENS_PER_LINE


def names_used_twice(path: Path) -> list[str]:
    """Tests of one module that share a name: only the last of them would run."""
    names = [node.name for node in parsed(path).body if isinstance(node, ast.FunctionDef)]
    return sorted({name for name in names if names.count(name) > 1})


def test_no_test_hides_another() -> None:
    found = {
        path.name: names for path in TESTS.rglob("test_*.py") if (names := names_used_twice(path))
    }
    assert found == {}


def test_fewer_and_fewer_modules_of_tests_are_kept_from_the_check_of_types() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests" in options["packages"]
    (listed,) = [one["module"] for one in options["overrides"] if one.get("ignore_errors")]
    assert len(listed) <= MAX_UNTYPED_MODULES
    gone = [name for name in listed if not (ROOT / f"{name.replace('.', '/')}.py").exists()]
    assert not gone

"""Follows a page of docs/contribute: puts its blocks into a copy of the tree, and runs commands
there.

A block ```python PATH``` is a new file; a block ```diff PATH``` changes one, hunk by hunk.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRIBUTE = ROOT / "docs" / "contribute"
BLOCK = re.compile(r"^```(python|diff) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def copy_tree(target: Path) -> None:
    """Copy all Python code to `target`."""
    ignored = shutil.ignore_patterns("bundled", "e2e")
    for name in ("weft", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)


def follow(page: Path, tree: Path, *, without: str = "") -> list[str]:
    """Do in `tree` what the page says, but for the file `without`. Returns the paths it touched."""
    paths = []
    for kind, path, text in BLOCK.findall(page.read_text("utf-8")):
        if path == without:
            continue
        paths.append(path)
        file = tree / path
        if kind == "python":
            assert not file.exists(), f"{path} is there already"
            file.write_text(text, "utf-8")
            continue
        for hunk in text.split("@@\n")[1:]:
            changed = patched(file.read_text("utf-8"), hunk, f"{page.name}, {path}")
            file.write_text(changed, "utf-8")
    return paths


def patched(text: str, hunk: str, place: str) -> str:
    """`text` with a hunk of a diff applied, whose old lines stand in it exactly once."""
    lines = hunk.splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
    new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
    is_clear = f"\n{text}".count(f"\n{old}") == 1
    assert is_clear, f"{place}: the file has changed, and the page has not: {old!r}"
    return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on the code in `tree`: pytest without plugins, which take
    longer to load than the few tests of a page to run."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

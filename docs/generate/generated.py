"""Files under docs/ that are made from the code: written, or compared with what they should be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def write_or_check(
    script: str, folder: Path, makers: Mapping[str, Callable[[], Iterator[str]]]
) -> int:
    """Write the files of `folder`, whose makers give their lines; only those that have changed.

    With `--check` on the command line nothing is written. Returns the exit status: 1 if a file is
    not up to date then, after a line that names such files and the script that writes them.
    """
    is_check = "--check" in sys.argv
    stale = []
    for name, make in makers.items():
        path = folder / name
        text = "\n".join(line.rstrip() for line in make()) + "\n"
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(f"docs/{folder.name}/{name}")
        if not is_check:
            path.write_text(text, "utf-8")
    if stale and is_check:
        print(f"not up to date: {', '.join(stale)} (python docs/generate/{script})")
        return 1
    return 0

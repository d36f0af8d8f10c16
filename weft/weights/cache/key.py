"""What packed weights are made of: the files of a model, and the code that reads and packs them.

A file is the same as before if its path, inode, size and both of its times are, and samples of its
bytes. Every change through the file system sets the time of change (`ctime`) from the system's
clock, and no program can set it otherwise. A file that was changed within the last moments could be
changed again within one tick of that clock, so its weights are not stored (`is_settled`). Reading
whole files instead would take longer than packing them saves.

Code is the same if its sources are: every module below the folders that take part, whole, so that
no developer has to remember a version of the layout.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from weft.weights.fetch import INDEX, weight_files

SETTLED_S = 2.0  # coarser than the clock of any file system
NUM_SAMPLES = 16
SAMPLE_BYTES = 4_096
HEAD_BYTES = 65_536
WEFT = Path(__file__).parents[2]
PACKAGES = ("config", "executor", "models", "ops", "weights")


def source_files(folder: Path) -> list[Path]:
    """The files of a model that determine its weights. Raises ModelError."""
    described = [folder / name for name in ("config.json", INDEX)]
    return [*weight_files(folder), *(path for path in described if path.is_file())]


def source_facts(files: Sequence[Path]) -> list[Any]:
    """The facts of these files, which change when a file does. Raises OSError."""
    return [_facts(path) for path in files]


def is_settled(files: Sequence[Path]) -> bool:
    """Whether the last change of each of these files is so long ago that another change would show.
    Raises OSError."""
    now = time.time()
    return all(now - path.stat().st_ctime > SETTLED_S for path in files)


@cache
def code_digest() -> str:
    """A digest of the sources that decide how weights are read and packed."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((WEFT / package).rglob("*.py")):
            digest.update(str(path.relative_to(WEFT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _facts(path: Path) -> list[Any]:
    real = path.resolve()
    file = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        digest = hashlib.sha256(os.pread(file, HEAD_BYTES, 0))
        for number in range(1, NUM_SAMPLES + 1):
            start = max(status.st_size * number // NUM_SAMPLES - SAMPLE_BYTES, 0)
            digest.update(os.pread(file, SAMPLE_BYTES, start))
    finally:
        os.close(file)
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return [str(real), status.st_ino, status.st_size, *times, digest.hexdigest()]

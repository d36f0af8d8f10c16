"""What packed weights are made of: the files of a model, and the code that reads and packs them.

A description (`config.json`) is known by all of its bytes. A file of weights is the same as before
if its path, inode, size and both of its times are, and samples of its bytes. Every change through
the file system sets the time of change (`ctime`) from the system's clock, and no program can set it
otherwise. A file that was changed within the last moments could be changed again within one tick of
that clock, so its weights are not stored (`is_settled`). Reading all bytes instead would take
longer than packing them saves.

Code is the same if its sources are: every module below the folders that take part, so that no
developer has to remember a version of the layout.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from weft.weights.fetch import INDEX, weight_files

SETTLED_S = 2.0  # coarser than the clock of any file system
NUM_SAMPLES = 16
SAMPLE_BYTES = 4_096
HEAD_BYTES = 65_536
WEFT = Path(__file__).parents[2]
PACKAGES = ("config", "executor", "models", "ops", "weights")


class SourceFiles(NamedTuple):
    """The files of a model that determine its weights."""

    weights: list[Path]
    descriptions: list[Path]

    def facts(self) -> list[Any]:
        """What changes when one of the files does. Raises OSError."""
        described = [
            [path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in self.descriptions
        ]
        return [*map(_facts, self.weights), *described]

    def is_settled(self) -> bool:
        """Whether the last change of the weights is so long ago that another change would show.
        Raises OSError."""
        now = time.time()
        return all(now - path.stat().st_ctime > SETTLED_S for path in self.weights)


def source_files(folder: Path) -> SourceFiles:
    """The files of the model in a folder. Raises ModelError."""
    described = [folder / name for name in ("config.json", INDEX)]
    described += sorted(folder.glob("*_Dense/*.safetensors"))  # small
    return SourceFiles(weight_files(folder), [path for path in described if path.is_file()])


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

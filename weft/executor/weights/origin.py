"""Where the weights in memory have come from: a folder, and what was put over it since.

Equal origins mean equal weights. Nothing is read here but the facts of files; whoever needs a
digest of all bytes computes it elsewhere, and then looks whether the files are still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


class FileFacts(NamedTuple):
    """What changes when a file is changed."""

    path: str
    num_bytes: int
    changed_ns: int
    inode: int


class WeightOrigin(NamedTuple):
    folder: Path | None  # None: the weights are random
    files: tuple[FileFacts, ...] = ()  # as they were before they were read
    added: bytes = b""  # digest of all that has come since, in order; empty: nothing has

    def with_added(self, content: bytes) -> WeightOrigin:
        """The origin after new weights with this digest were put in."""
        return self._replace(added=hashlib.sha256(self.added + content).digest())


def origin_of(folder: Path | None) -> WeightOrigin:
    """The origin of weights that are about to be read from a folder. Raises OSError."""
    if folder is None:
        return WeightOrigin(None)
    facts: list[FileFacts] = []
    for path in files_of(folder):
        status = path.stat()
        facts.append(FileFacts(str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    return WeightOrigin(folder, tuple(facts))


def files_of(folder: Path) -> list[Path]:
    """The files of a model's folder that hold weights, and what says how they are read; none if
    it is not there."""
    if not folder.is_dir():
        return []
    weights = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    described = folder / "config.json"
    if weights and described.exists():
        return [*weights, described]
    return weights


def digest_of(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Of what came over the network."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()

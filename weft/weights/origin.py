"""The origin of the weights in memory: a folder, and later updates.

Equal origins mean equal weights. This module reads only the metadata of files (`FileFacts`). A
caller that needs a digest of all bytes computes it, and then checks that the files have not
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


class FileFacts(NamedTuple):
    """The metadata of a file that changes with its content."""

    path: str
    num_bytes: int
    changed_ns: int
    inode: int


class WeightOrigin(NamedTuple):
    folder: Path | None  # None: the weights are random
    files: tuple[FileFacts, ...] = ()  # taken before the files were read
    added: bytes = b""  # digest of all later updates, in order; empty: there were none

    def with_added(self, content: bytes) -> WeightOrigin:
        """The origin after an update with weights of this digest."""
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
    """The files of a model's folder that hold weights, and its config.json, which determines how
    they are read; none if the folder does not exist."""
    if not folder.is_dir():
        return []
    weights = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    described = folder / "config.json"
    if weights and described.exists():
        return [*weights, described]
    return weights


def digest_of(pieces: Iterable[bytes | memoryview]) -> bytes:
    """The SHA-256 digest of weights from the network."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()

"""A GGUF file as `Content` from which weights are loaded: its tensors under weft's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.config.metadata import metadata_value
from weft.config.model import BadCheckpoint
from weft.weights.gguf.names import renamed
from weft.weights.gguf.reader import GgufFile


class GgufContent(GgufFile):
    """A file of a model, which may be one of several. It is closed at the end of a `with` block."""

    def __init__(
        self, path: Path, label: str = "", metadata: Mapping[str, Any] | None = None
    ) -> None:
        """`metadata`: of the model's first file, which has the metadata for all files; None: this
        is the first file."""
        super().__init__(path, label)
        if metadata is None:
            metadata = self.header.metadata
        self.entries = renamed(self.header.tensors, metadata)


def check_split(files: Iterable[GgufFile]) -> None:
    """Raise BadCheckpoint unless these files are all parts of one model, in order."""
    parts = list(files)
    num_parts = _count(parts[0], "split.count", 1)
    if num_parts != len(parts) and (num_parts, len(parts)) != (0, 1):
        raise BadCheckpoint(
            f"{parts[0].label} is one of {num_parts} files of a model; found are {len(parts)}"
        )
    seen: set[str] = set()
    for index, part in enumerate(parts):
        number = _count(part, "split.no", 0)
        if number != index:
            raise BadCheckpoint(f"{part.label} is file {number} of its model, not {index}")
        twice = seen & part.header.tensors.keys()
        if twice:
            raise BadCheckpoint(f"{part.label} has {min(twice)[:200]}, as a file before it has")
        seen |= part.header.tensors.keys()
    total = _count(parts[0], "split.tensors.count", len(seen))
    if total != len(seen):
        raise BadCheckpoint(f"{parts[0].label} and its parts have {len(seen)} tensors, not {total}")


def _count(part: GgufFile, key: str, default: int) -> int:
    return metadata_value(part.label, part.header.metadata, key, int, default)

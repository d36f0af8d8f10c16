"""Whether a model folder is whole, by the names, sizes and headers of its files; no weight is loaded."""

from __future__ import annotations

from pathlib import Path

from weft.config.model import ModelNotFound
from weft.executor.weights.fetch import weight_files
from weft.executor.weights.safetensors import Entry, FileContent


def check_files(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelError unless `folder` has a tokenizer and whole safetensors files. Costs milliseconds."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json; weft reads tokenizers in this format only")
    if weights:
        read_headers(folder)


def read_headers(folder: Path) -> dict[str, Entry]:
    """All tensors in a folder, by name. Raises ModelError."""
    found: dict[str, Entry] = {}
    for path in weight_files(folder):
        with FileContent(path) as content:
            found |= content.entries
    return found

"""Whether a model folder is whole, by the names, sizes and headers of its files and a few values of each weight."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.executor.weights.fetch import weight_files
from weft.executor.weights.safetensors import Content, FileContent, TensorEntry

NUM_LOOKED_AT = 64  # values at the beginning of each weight


class _Floats(NamedTuple):
    """How numbers of a type lie in memory."""

    word: Literal["H", "I", "Q"]
    num_bytes: int
    exponent: int  # its bits; all set in what is infinite or no number
    mantissa: int  # its bits; one is set in what is no number


_FLOATS = {
    "BF16": _Floats("H", 2, 0x7F80, 0x007F),
    "F16": _Floats("H", 2, 0x7C00, 0x03FF),
    "F32": _Floats("I", 4, 0x7F80_0000, 0x007F_FFFF),
    "F64": _Floats("Q", 8, 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
}


def check_files(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelError unless `folder` has a tokenizer and whole safetensors files, whose weights begin with numbers.
    Costs milliseconds."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(
            f"{folder} has no tokenizer.json; weft reads tokenizers in this format only"
        )
    if weights:
        for path in weight_files(folder):
            with FileContent(path) as content:
                _check_values(content)


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """All tensors in a folder, by name. Raises ModelError."""
    found: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        with FileContent(path) as content:
            found |= content.entries
    return found


def _check_values(content: Content) -> None:
    """Raise BadCheckpoint for a weight that holds no numbers: every request of such a model would fail."""
    for entry in content.entries.values():
        floats = _FLOATS.get(entry.dtype)
        if floats is None or not entry.num_bytes:
            continue
        data = bytearray(min(entry.num_bytes, NUM_LOOKED_AT * floats.num_bytes))
        content.read_into(entry.start, memoryview(data))
        values = memoryview(data).cast(floats.word)
        endless = [value for value in values if value & floats.exponent == floats.exponent]
        if any(value & floats.mantissa for value in endless) or len(endless) == len(values):
            raise BadCheckpoint(
                f"{content.label} is damaged: {entry.name[:200]} holds values that are no finite numbers"
            )

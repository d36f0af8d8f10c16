"""Whether a model folder is whole, by the names, sizes and headers of its files; no weight is loaded.

A safetensors file is an 8-byte length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, and then the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.executor.weights.fetch import weight_files

MAX_HEADER_BYTES = 100_000_000


class Tensor(NamedTuple):
    dtype: str  # as the file says: "F32", "BF16"
    shape: tuple[int, ...]


def check_files(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelError unless `folder` has a tokenizer and whole safetensors files. Costs milliseconds."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json; weft reads tokenizers in this format only")
    if weights:
        read_headers(folder)


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Types and shapes of all tensors in a folder, by name. Raises ModelError."""
    return {name: tensor for path in weight_files(folder) for name, tensor in read_header(path).items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """Types and shapes of the tensors in a safetensors file. Raises BadCheckpoint if it is damaged or not whole."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if not 2 <= header_len <= min(MAX_HEADER_BYTES, num_bytes):
            raise BadCheckpoint(f"{path} is no safetensors file, or not downloaded to its end ({num_bytes:,} bytes)")
        try:
            entries = {name: entry for name, entry in json.loads(file.read(header_len)).items() if name[:2] != "__"}
            tensors = {name: _tensor(entry) for name, entry in entries.items()}
            expected = 8 + header_len + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            raise BadCheckpoint(f"{path} has a damaged header") from exc
    if expected != num_bytes:
        raise BadCheckpoint(
            f"{path} has {num_bytes:,} bytes, its header says {expected:,}: it is damaged, or not downloaded to its end"
        )
    return tensors


def _tensor(entry: dict[str, Any]) -> Tensor:
    return Tensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))

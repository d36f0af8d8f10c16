"""Reads the header of safetensors, from a file or from bytes in memory. Everything in the header is
checked before it is used.

    8 bytes: N (little-endian) · N bytes: JSON {name: {dtype, shape, data_offsets}} · the tensors

Knows no tensors, only the offsets of their bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.config.model import BadCheckpoint
from weft.weights.regular_file import RegularFile

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
} | {f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)}
MAX_HEADER_BYTES = 100_000_000


class TensorEntry(NamedTuple):
    """The offsets of one tensor."""

    name: str
    dtype: str  # name in the file's format: "F32", "BF16", "Q4_K"
    shape: tuple[int, ...]
    start: int  # first byte
    num_bytes: int
    # Rows of a head, if its rotated pairs are consecutive rows (GGUF's llama); 0: the usual order.
    paired_rows: int = 0


class Content(Protocol):
    """A checked header, and the bytes after it."""

    label: str  # for error messages

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises BadCheckpoint if there are not so
        many."""
        ...


class FileContent(RegularFile):
    """A safetensors file, closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """`label` is the name for error messages. Raises BadCheckpoint unless it is a complete
        safetensors file."""
        super().__init__(path, label)
        try:
            self.entries = _entries(self.label, self.read_into, self.num_bytes)
        except BaseException:
            self.close()
            raise


class BytesContent:
    """Safetensors in memory."""

    def __init__(self, data: bytes | bytearray, label: str) -> None:
        """`data` must not change afterwards. Raises BadCheckpoint."""
        self.label = label
        self._data = memoryview(data)
        self.entries = _entries(label, self.read_into, len(data))

    def read_into(self, start: int, target: memoryview) -> None:
        found = self._data[start : start + len(target)]
        if len(found) < len(target):
            raise BadCheckpoint(f"{self.label} is damaged: it ends in the middle of a tensor")
        target[:] = found


def _entries(
    label: str, read_into: Callable[[int, memoryview], None], num_bytes: int
) -> dict[str, TensorEntry]:
    """The tensors that the header lists. Raises BadCheckpoint unless they fill the bytes after the
    header exactly."""
    header_len = int.from_bytes(_read(read_into, 0, 8), "little") if num_bytes >= 8 else 0
    if not 2 <= header_len <= min(MAX_HEADER_BYTES, num_bytes - 8):
        raise BadCheckpoint(
            f"{label} is damaged, or not downloaded to its end: "
            f"{num_bytes:,} bytes without a header"
        )
    try:
        header = json.loads(_read(read_into, 8, header_len))
        found = [
            _entry(label, name, entry, 8 + header_len)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except BadCheckpoint:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise BadCheckpoint(f"{label} is damaged: its header is not valid") from exc
    end = 8 + header_len
    for entry in sorted(found, key=lambda one: (one.start, one.num_bytes)):
        if entry.start != end:
            raise BadCheckpoint(
                f"{label} is damaged: {entry.name[:200]} begins at byte {entry.start:,}, "
                f"not {end:,}"
            )
        end += entry.num_bytes
    if end != num_bytes:
        raise BadCheckpoint(
            f"{label} is damaged, or not downloaded to its end: {num_bytes:,} bytes; "
            f"its header says {end:,}"
        )
    return {entry.name: entry for entry in found}


def _entry(
    label: str,
    name: str,
    entry: Mapping[str, Any],
    data_start: int,
) -> TensorEntry:
    """The entry of a tensor in the header. Raises BadCheckpoint if its bytes do not fit its shape;
    ValueError, TypeError or LookupError if it is otherwise invalid."""
    dtype = entry["dtype"]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes are whole numbers")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        raise BadCheckpoint(
            f"{label} is damaged: {name[:200]} has {end - begin:,} bytes, but {shape[:8]} of "
            f"{dtype} take {num_bytes:,}"
        )
    return TensorEntry(
        name,
        dtype,
        tuple(shape),
        data_start + begin,
        num_bytes,
    )


def _read(
    read_into: Callable[[int, memoryview], None],
    start: int,
    num_bytes: int,
) -> bytes:
    target = bytearray(num_bytes)
    read_into(start, memoryview(target))
    return bytes(target)

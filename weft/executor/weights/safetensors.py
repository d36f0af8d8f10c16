"""Reads safetensors: from a file, or from bytes that came otherwise. Nothing is believed before it
is checked.

    8 bytes: N (little-endian) · N bytes: JSON {name: {dtype, shape, data_offsets}} · the tensors

Content is read with `pread` into memory of the caller, not mapped: what was read does not stay in
this process, and a file that shrinks meanwhile gives an error, not a signal. Knows no tensors, only
where their bytes lie.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from weft.config.model import BadCheckpoint

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
    """One tensor: where it lies."""

    name: str
    dtype: str  # as the format says: "F32", "BF16"
    shape: tuple[int, ...]
    start: int  # first byte
    num_bytes: int


class Content(Protocol):
    """A header that has been checked, and the bytes behind it."""

    label: str  # for errors

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises BadCheckpoint if there are not so
        many."""
        ...


class FileContent:
    """A file. It is closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """`label` is the name for errors. Raises BadCheckpoint unless it is a whole safetensors
        file."""
        self.label = label or str(path)
        try:
            # A FIFO would wait for a writer.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            raise BadCheckpoint(f"{self.label} cannot be opened: {exc.strerror}") from exc
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise BadCheckpoint(f"{self.label} is not a regular file")
            self.entries = _entries(self.label, self.read_into, status.st_size)
        except BaseException:
            self.close()
            raise

    def read_into(self, start: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                num = os.preadv(self._file, [target[done:]], start + done)
            except OSError as exc:
                raise BadCheckpoint(f"{self.label} cannot be read: {exc.strerror}") from exc
            if not num:
                raise BadCheckpoint(f"{self.label} is damaged: it ends in the middle of a tensor")
            done += num

    def will_be_read(self) -> None:
        """Let the system fetch the file from the disk ahead of the reading, where it can."""
        if sys.platform == "linux":
            os.posix_fadvise(
                self._file,
                0,
                0,
                os.POSIX_FADV_SEQUENTIAL,
            )
            os.posix_fadvise(
                self._file,
                0,
                0,
                os.POSIX_FADV_WILLNEED,
            )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> FileContent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BytesContent:
    """The same in memory."""

    def __init__(self, data: bytes, label: str) -> None:
        """Raises BadCheckpoint."""
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
    """The tensors that the header tells of. Raises BadCheckpoint unless they fill what is behind it
    exactly."""
    header_len = int.from_bytes(_read(read_into, 0, 8), "little") if num_bytes >= 8 else 0
    if not 2 <= header_len <= min(MAX_HEADER_BYTES, num_bytes - 8):
        raise BadCheckpoint(
            f"{label} is damaged, or not downloaded to its end: "
            f"{num_bytes:,} bytes without a header"
        )
    try:
        header = json.loads(_read(read_into, 8, header_len))
        found = [
            _entry(name, entry, 8 + header_len)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise BadCheckpoint(f"{label} is damaged: its header makes no sense") from exc
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
    name: str,
    entry: Mapping[str, Any],
    data_start: int,
) -> TensorEntry:
    """Raises ValueError, TypeError or LookupError for what makes no sense."""
    dtype = entry["dtype"]
    shape = entry["shape"]
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes are whole numbers")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        raise ValueError("a tensor has other bytes than its shape")
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

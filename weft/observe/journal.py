"""A journal on disk: records, one after the other, in a file that is worth something however its writer ended.

    magic (8 bytes)  then for each record:  length (uint32) · CRC-32 (uint32) · the record       (little-endian)

It knows nothing of what the records say. `append` collects them, `flush` hands them to the kernel in one write: what
was flushed survives the end of the process, though not that of the machine (there is no fsync). The file is for its
owner alone: it holds what users sent.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from weft.observe.log import EventLog

MAGIC = b"weftjnl\n"
FLUSH_BYTES = 1 << 16  # that are collected at most
MAX_RECORD_BYTES = 1 << 30
_FRAME = struct.Struct("<II")

log = EventLog("journal")


class JournalError(Exception):
    """The file cannot be read, or is no journal. The message is for the user."""


class JournalWriter:
    """Writes FILE; what was there before becomes FILE.1.

    Raises JournalError if FILE cannot be made. After that nothing raises: on the first error it ends, in the log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # of this file
        self._buffer = bytearray()
        self._file = -1
        try:
            self._open()
        except OSError as exc:
            raise JournalError(f"cannot write {path}: {exc.strerror}") from exc

    def append(self, record: bytes) -> None:
        """Add a record. It is on its way to the disk after the next `flush`."""
        self._buffer += _FRAME.pack(len(record), zlib.crc32(record))
        self._buffer += record
        if len(self._buffer) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._buffer and self._file >= 0:
            try:
                _write(self._file, self._buffer)
            except OSError as exc:
                log.error("journal_ended", path=self.path, reason=exc.strerror)
                self.close()
        self.num_bytes += len(self._buffer)
        self._buffer.clear()

    def rotate(self) -> None:
        """FILE becomes FILE.1; go on in a new FILE."""
        self.flush()
        if self._file >= 0:
            self.close()
            try:
                self._open()
            except OSError as exc:
                log.error("journal_ended", path=self.path, reason=exc.strerror)

    def close(self) -> None:
        """End for good. May be called more than once."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _open(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._buffer[:0] = MAGIC
        self.num_bytes = 0


class JournalReader:
    """Iterates over the records of a file, up to its end or the first damage. Raises JournalError on opening.

    A context manager; the end of the iteration closes the file, too.
    """

    def __init__(self, path: Path) -> None:
        self.num_lost_bytes = 0  # behind the last whole record, known at the end of the iteration
        try:
            self._file = path.open("rb")
        except OSError as exc:
            raise JournalError(f"cannot read {path}: {exc.strerror}") from exc
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        if self._file.read(len(MAGIC)) != MAGIC:
            self._file.close()
            raise JournalError(f"{path} is no journal of weft")

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        at = len(MAGIC)
        with self._file:
            while (record := self._next()) is not None:
                at += _FRAME.size + len(record)
                yield record
        self.num_lost_bytes = self._num_bytes - at

    def _next(self) -> bytes | None:
        frame = self._file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return None
        length, crc = _FRAME.unpack(frame)
        if length > min(MAX_RECORD_BYTES, self._num_bytes):
            return None
        record = self._file.read(length)
        return record if len(record) == length and zlib.crc32(record) == crc else None


def _write(file: int, data: bytes | bytearray) -> None:
    """All of `data`: as a rule in one call of the system."""
    view = memoryview(data)
    try:
        while view:
            written = os.write(file, view)
            view = view[written:]
    finally:
        view.release()

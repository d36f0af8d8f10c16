"""A journal on disk: consecutive records in a file that stays readable however its writer ended.

    magic (8 bytes), then for each record:
    length · CRC-32 of the record · CRC-32 of these two · the record

Numbers are uint32, little-endian. Each head has a checksum of its own. So a reader can distinguish
an unfinished last record (its writer ended; the head is valid, but bytes are missing) from bytes
that have changed since. After damage, a reader can continue at the next record that begins with
given bytes (`JournalReader.resume`).

This module knows nothing of the meaning of records. `append` collects them, `flush` passes them to
the kernel in one write: flushed records survive the end of the process, but not that of the machine
(there is no fsync). Only the owner may read the file, because it holds what users sent.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from weft.observe.log import EventLog

MAGIC = b"weftjn2\n"
OLD_MAGIC = b"weftjnl\n"  # of the format without checksums of heads
FLUSH_BYTES = 1 << 16  # the most bytes that are collected before a write
_HEAD = struct.Struct("<II")  # length and checksum of a record
_HEAD_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _HEAD_CRC.size

log = EventLog("journal")


class JournalError(Exception):
    """The file cannot be read, or is not a journal. The message is for the user."""


class Damage(NamedTuple):
    """A place where a file differs from what was written."""

    offset: int  # byte offset of the record in the file
    record: int  # number of the record, from 1; 0: unknown, because of earlier damage
    what: str

    def __str__(self) -> str:
        number = f" (record {self.record:,})" if self.record else ""
        return f"byte {self.offset:,}{number}: {self.what}"


class JournalWriter:
    """Writes FILE; an existing FILE is renamed to FILE.1.

    Raises JournalError if FILE cannot be created. Later errors raise nothing: the first one ends
    the journal and is logged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # written to the current file
        self._buffer = bytearray()
        self._file = -1
        try:
            self._open()
        except OSError as exc:
            raise JournalError(f"cannot write {path}: {exc.strerror}") from exc

    def append(self, record: bytes) -> None:
        """Add a record. The next `flush` writes it."""
        head = _HEAD.pack(len(record), zlib.crc32(record))
        self._buffer += head
        self._buffer += _HEAD_CRC.pack(zlib.crc32(head))
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
            else:
                self.num_bytes += len(self._buffer)
        self._buffer.clear()

    def rotate(self) -> None:
        """Rename FILE to FILE.1 and continue in a new FILE."""
        self.flush()
        if self._file >= 0:
            self.close()
            try:
                self._open()
            except OSError as exc:
                log.error("journal_ended", path=self.path, reason=exc.strerror)

    def close(self) -> None:
        """End for good. May be called again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.num_bytes = 0

    def _open(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._buffer[:0] = MAGIC
        self.num_bytes = 0


class JournalReader:
    """Iterates over the records of a file, up to its end or the first damage. Raises JournalError
    on opening.

    After the iteration, `damage` is set if damage stopped it; `num_torn_bytes` if the writer did
    not finish the last record; else neither. After damage, `resume` finds the next good record.
    A context manager; the end of the iteration also closes the file.
    """

    def __init__(self, path: Path) -> None:
        self.damage: Damage | None = None
        self.num_torn_bytes = 0
        self.num_records = 0  # records that were read
        self.path = path
        self._is_resumed = False
        try:
            self._file = path.open("rb")
        except OSError as exc:
            raise JournalError(f"cannot read {path}: {exc.strerror}{_elsewhere(path)}") from exc
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._at = len(MAGIC)
        magic = self._file.read(len(MAGIC))
        if magic != MAGIC:
            self._file.close()
            if magic == OLD_MAGIC:
                raise JournalError(
                    f"{path} is a journal in the format of an older weft; that version replays it"
                )
            raise JournalError(f"{path} is not a journal of weft")

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        """Continue where the previous iteration stopped."""
        if self._file.closed:
            return
        with self._file:
            while (record := self._next()) is not None:
                self._at += HEAD_BYTES + len(record)
                self.num_records += 1
                yield record

    @property
    def offset(self) -> int:
        """Start of the next record, in bytes from the beginning of the file."""
        return self._at

    def go_to(self, offset: int) -> None:
        """Continue with the record that begins at `offset`, a value that `offset` had earlier."""
        if self._file.closed:
            self._file = self.path.open("rb")
        self._file.seek(offset)
        self._at = offset
        self._is_resumed = offset > len(MAGIC)  # records before it were not counted
        self.num_records = 0
        self.damage = None
        self.num_torn_bytes = 0

    def resume(self, beginning: bytes) -> bool:
        """After damage: continue with the next whole record that begins with `beginning`.

        Returns whether there is one; then `damage` is None until the iteration finds more damage.
        """
        assert self.damage is not None
        with self.path.open("rb") as file, _mapped(file.fileno()) as data:
            at = _find(data, self._at, beginning)
        if at is None:
            return False
        self.go_to(at)
        return True

    def _next(self) -> bytes | None:
        """The next record; None at the end of the file, at damage or at an unfinished record."""
        num_left = self._num_bytes - self._at
        if num_left < HEAD_BYTES:
            self.num_torn_bytes = num_left
            return None
        head = self._file.read(_HEAD.size)
        (head_crc,) = _HEAD_CRC.unpack(self._file.read(_HEAD_CRC.size))
        if zlib.crc32(head) != head_crc:
            self._found_damage("the head of the record has changed")
            return None
        length, crc = _HEAD.unpack(head)
        if HEAD_BYTES + length > num_left:
            self.num_torn_bytes = num_left
            return None
        record = self._file.read(length)
        if zlib.crc32(record) != crc:
            self._found_damage(f"the {length:,} bytes of the record have changed")
            return None
        return record

    def _found_damage(self, what: str) -> None:
        number = 0 if self._is_resumed else self.num_records + 1
        self.damage = Damage(self._at, number, what)


def _mapped(file: int) -> mmap.mmap:
    return mmap.mmap(file, 0, access=mmap.ACCESS_READ)


def _find(data: mmap.mmap, at: int, beginning: bytes) -> int | None:
    """Offset of the first whole record after the damaged one at `at` that begins with `beginning`;
    None if there is none.

    The search follows the lengths of records, so that it never takes bytes inside a user's data for
    a record. Only where a head, and with it the length, has changed, it searches for `beginning`.
    """
    while at + HEAD_BYTES <= len(data):
        length = _length(data, at)
        if length is None:
            at = data.find(beginning, at + HEAD_BYTES + 1) - HEAD_BYTES
            if at < 0:
                return None
            continue
        record = at + HEAD_BYTES
        end = record + length
        if data[record : record + len(beginning)] == beginning:
            _, crc = _HEAD.unpack_from(data, at)
            if zlib.crc32(data[record:end]) == crc:
                return at
        at = end
    return None


def _length(data: mmap.mmap, at: int) -> int | None:
    """The length of the record whose head is at `at`; None if there is no head of a whole
    record."""
    (head_crc,) = _HEAD_CRC.unpack_from(data, at + _HEAD.size)
    if zlib.crc32(data[at : at + _HEAD.size]) != head_crc:
        return None
    length: int = _HEAD.unpack_from(data, at)[0]
    if at + HEAD_BYTES + length > len(data):
        return None
    return length


def _write(file: int, data: bytes | bytearray) -> None:
    """Write all of `data`, normally in one system call."""
    view = memoryview(data)
    try:
        while view:
            written = os.write(file, view)
            view = view[written:]
    finally:
        view.release()


def _elsewhere(path: Path) -> str:
    """Where the journals are that a server with several models or engines has written."""
    if path.is_dir():
        return "; each load of several models has a file, FOLDER/NAME/000001"
    first = Path(f"{path}.dp0")
    if first.exists():
        return f"; each engine has a file, the first one {first}"
    return ""

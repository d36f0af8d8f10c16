"""One file of the weights cache: blocks of bytes that processes map, and the facts they belong to.

    magic · length · SHA-256 of the head · description (JSON) · sum of each chunk | block | block ..
    |---------------------------- head, whole chunks -----------------------------|--- whole chunks

The head is written last, so a file that was not written to its end has none. Every byte that is
read is covered: the head by its digest, and the blocks by sums, which take no longer than reading
memory does. A file with any fault is not used. Knows nothing of weights: a description is JSON of
the caller.

The mapping is private: pages belong to all processes that map the file until one of them writes to
a page, which then becomes its own. Nothing reaches the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.json_types import JsonObject

MAGIC = b"weft weights 01\n"
CHUNK = 1 << 21  # bytes of one sum; a huge page
LINE = 64  # blocks begin at multiples of it
BUFFER_CHUNKS = 8  # written at once, so that the system keeps the file in huge pages
MAX_DESCRIPTION_BYTES = 1 << 28
_FIXED = len(MAGIC) + 8 + 32

Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """The file cannot be used; the message gives the reason."""


class Mapped(NamedTuple):
    """A file in memory. It counts as used (`is_in_use`) until the last block is freed."""

    description: JsonObject
    blocks: list[Bytes]  # writable; what is written stays in this process
    num_bytes: int


def write(file: int, description: JsonObject, blocks: Sequence[Bytes]) -> int:
    """Write a whole file to the descriptor `file`, to the disk. Returns its size. Raises
    OSError."""
    data_bytes = _spans([len(block) for block in blocks])[-1]
    num_chunks = -(-data_bytes // CHUNK)
    described = json.dumps({**description, "sizes": [len(block) for block in blocks]}).encode()
    head_bytes = _whole_chunks(_FIXED + len(described) + 8 * num_chunks)
    sums: list[NDArray[np.uint64]] = []
    position = head_bytes
    for piece in _pieces(blocks):
        _write_all(file, piece.data, position)
        position += len(piece)
        sums.append(_sums(piece))
    checked = described + b"".join(each.tobytes() for each in sums)
    digest = hashlib.sha256(checked).digest()
    # The data must be on the disk before a head says so.
    os.fsync(file)
    head = MAGIC + len(described).to_bytes(8, "little") + digest + checked
    _write_all(file, memoryview(head), 0)
    os.fsync(file)
    return position


def open_file(path: Path) -> int:
    """Open a file of the cache, and keep it in use. Raises OSError, and Damaged for a file that
    another user may have written."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise Damaged("another user may write to it")
        fcntl.flock(file, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    return file


def read_description(file: int) -> JsonObject:
    """The description in an open file. Raises Damaged and OSError."""
    return _head(file).description


def map_file(file: int) -> Mapped:
    """Map an open file, and check every byte of it. `file` may be closed afterwards. Raises Damaged
    and OSError."""
    description, sums, head_bytes = _head(file)
    sizes = description.pop("sizes")
    spans = _spans(sizes)
    num_bytes = os.fstat(file).st_size
    if num_bytes != head_bytes + _whole_chunks(spans[-1]):
        raise Damaged(f"it has {num_bytes:,} bytes, and its head says otherwise")
    # Python's mapping has a copy of the descriptor, and with it the lock of `open_file`.
    mapping = mmap.mmap(
        file, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    if sys.platform == "linux":
        with suppress(OSError):  # a system without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(mapping, dtype=np.uint8)[head_bytes:]
    if not np.array_equal(_sums(data), sums):
        raise Damaged("its content has changed")
    blocks = [data[start : start + size] for start, size in zip(spans[:-1], sizes, strict=True)]
    return Mapped(description, blocks, num_bytes)


def is_in_use(file: int) -> bool:
    """Whether any process maps an open file that this one has not locked. If not, no process can
    begin to until `file` is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class _Head(NamedTuple):
    description: JsonObject
    sums: NDArray[np.uint64]
    num_bytes: int  # whole chunks


def _head(file: int) -> _Head:
    fixed = os.pread(file, _FIXED, 0)
    if len(fixed) < _FIXED or not fixed.startswith(MAGIC):
        raise Damaged("it was not written to its end")
    described_bytes = int.from_bytes(fixed[len(MAGIC) : len(MAGIC) + 8], "little")
    if described_bytes > MAX_DESCRIPTION_BYTES:
        raise Damaged("its head is too long")
    described = os.pread(file, described_bytes, _FIXED)
    try:
        description: Any = json.loads(described)
        spans = _spans(description["sizes"])
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise Damaged("its head is not valid") from exc
    num_chunks = -(-spans[-1] // CHUNK)
    summed = os.pread(file, 8 * num_chunks, _FIXED + described_bytes)
    if hashlib.sha256(described + summed).digest() != fixed[-32:]:
        raise Damaged("its head has changed")
    head_bytes = _whole_chunks(_FIXED + described_bytes + 8 * num_chunks)
    return _Head(description, np.frombuffer(summed, dtype="<u8"), head_bytes)


def _spans(sizes: Sequence[int]) -> list[int]:
    """Where each of the blocks begins behind the head, and the end of the last one."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // LINE) * LINE)
    return starts


def _whole_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK) * CHUNK


def _pieces(blocks: Sequence[Bytes]) -> Iterator[Bytes]:
    """The bytes behind the head, in pieces of whole chunks, each valid until the next one."""
    buffer = np.zeros(BUFFER_CHUNKS * CHUNK, dtype=np.uint8)
    filled = 0
    for block in blocks:
        done = 0
        while done < len(block):
            num = min(len(block) - done, len(buffer) - filled)
            buffer[filled : filled + num] = block[done : done + num]
            done += num
            filled += num
            if filled == len(buffer):
                yield buffer
                filled = 0
        gap = -filled % LINE
        buffer[filled : filled + gap] = 0
        filled += gap
        if filled == len(buffer):
            yield buffer
            filled = 0
    if filled:
        end = _whole_chunks(filled)
        buffer[filled:end] = 0
        yield buffer[:end]


def _sums(data: Bytes) -> NDArray[np.uint64]:
    """The sum of the 64-bit words of each chunk, modulo 2^64."""
    words = data.view("<u8").reshape(-1, CHUNK // 8)
    sums: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
    return sums


def _write_all(file: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], position + done)

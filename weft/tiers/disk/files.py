"""One stored block: a file with a header and the bytes of its pages.

    header, 4 kB and more: magic, key, tokens, sizes, CRC-32 of the pages, CRC-32 of the header
    pages, one after the other: the pieces of a page in the order of the pool's tensors

A file is written under another name and then renamed, without waiting for the disk: a block
that was damaged by a crash, or in any other way, fails a comparison here, and its tokens are
computed. The tokens in the header are compared, too, so a collision of keys does no harm.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weft.tiers.pages import MAX_PIECES, without_first

MAGIC = b"weft kv\x01"
SUFFIX = ".kv"
TEMPORARY = ".tmp"
# Magic, key, bytes of tokens, bytes of pages, CRC-32 of pages; then the tokens, then a CRC-32.
FIXED = struct.Struct("<8s32sIQI")
CHECKSUM = struct.Struct("<I")
ALIGNMENT = 4_096  # where the pages begin


class DamagedBlock(Exception):
    """The content of a file does not match its name. The message says why."""


def header_bytes(num_token_bytes: int) -> int:
    """Bytes before the pages."""
    size = FIXED.size + num_token_bytes + CHECKSUM.size
    return -(-size // ALIGNMENT) * ALIGNMENT


def file_bytes(num_token_bytes: int, num_page_bytes: int) -> int:
    return header_bytes(num_token_bytes) + num_page_bytes


def write_block(
    path: Path,
    key: bytes,
    tokens: bytes,
    pieces: Sequence[memoryview],
    may_replace: Callable[[], bool],
) -> int:
    """Write a block. `may_replace` is called after the pieces have been read for the last time, and
    returns whether their content was valid. Returns the bytes of the file; 0 if it was not.

    Raises OSError; then the file does not exist, or is the old one.
    """
    checksum = 0
    size = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        size += len(piece)
    header = _header(key, tokens, size, checksum)
    beside = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            written = _move(os.pwritev, handle, [memoryview(header), *pieces], 0)
        finally:
            os.close(handle)
        if not may_replace():
            os.unlink(beside)
            return 0
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    return written


def block_bytes(key: bytes, tokens: bytes, pieces: Sequence[memoryview]) -> bytes:
    """A block as one piece of bytes, for a store that has no files."""
    checksum = 0
    size = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
        size += len(piece)
    return b"".join([_header(key, tokens, size, checksum), *pieces])


def copy_block(block: bytes, key: bytes, tokens: bytes, pieces: Sequence[memoryview]) -> None:
    """Copy the pages of a block from `block_bytes` into `pieces`. Raises DamagedBlock for anything
    that is not this block; then no byte has been copied."""
    size = sum(len(piece) for piece in pieces)
    start = header_bytes(len(tokens))
    if len(block) != start + size:
        raise DamagedBlock(f"it has {len(block):,} bytes instead of {start + size:,}")
    checksum = _check_header(block[:start], key, tokens, size)
    pages = memoryview(block)[start:]
    if zlib.crc32(pages) != checksum:
        raise DamagedBlock("its checksum is wrong")
    at = 0
    for piece in pieces:
        piece[:] = pages[at : at + len(piece)]
        at += len(piece)


def touch(paths: Sequence[Path]) -> None:
    """Note in files that they are used now, in this order."""
    for path in paths:
        now_ns = time.time_ns()  # the system's own times are equal for many files
        with suppress(OSError):
            os.utime(path, ns=(now_ns, now_ns))


def unlink(paths: Sequence[Path]) -> None:
    """Delete files, also those that are gone."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


class ReadBlock(NamedTuple):
    """A block whose pages have been read but not checked."""

    num_bytes: int
    pieces: Sequence[memoryview]
    checksum: int  # expected checksum of the pieces

    def check(self) -> None:
        """Raises DamagedBlock."""
        found = 0
        for piece in self.pieces:
            found = zlib.crc32(piece, found)
        if found != self.checksum:
            raise DamagedBlock("its checksum is wrong")


def read_block(
    path: Path,
    key: bytes,
    tokens: bytes,
    pieces: Sequence[memoryview],
) -> ReadBlock:
    """Read a block into `pieces`. Their content is undefined if this, or the later check, raises.

    Raises OSError, and DamagedBlock for a file that is not this block.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = sum(len(piece) for piece in pieces)
        start = header_bytes(len(tokens))
        status = os.fstat(handle)
        if status.st_size != start + size:
            raise DamagedBlock(f"it has {status.st_size:,} bytes instead of {start + size:,}")
        header = os.pread(handle, start, 0)
        checksum = _check_header(header, key, tokens, size)
        _move(os.preadv, handle, pieces, start)
    finally:
        os.close(handle)
    return ReadBlock(start + size, pieces, checksum)


def _header(key: bytes, tokens: bytes, size: int, checksum: int) -> bytes:
    fixed = FIXED.pack(MAGIC, key, len(tokens), size, checksum)
    content = fixed + tokens
    content += CHECKSUM.pack(zlib.crc32(content))
    return content.ljust(header_bytes(len(tokens)), b"\0")


def _check_header(header: bytes, key: bytes, tokens: bytes, size: int) -> int:
    """Returns the CRC-32 of the pages. Raises DamagedBlock."""
    end = FIXED.size + len(tokens)
    if len(header) < end + CHECKSUM.size:
        raise DamagedBlock("it ends in its header")
    content = header[:end]
    if CHECKSUM.unpack_from(header, end)[0] != zlib.crc32(content):
        raise DamagedBlock("its header is damaged")
    magic, stored_key, num_token_bytes, num_page_bytes, checksum = FIXED.unpack_from(content)
    if magic != MAGIC:
        raise DamagedBlock("it is of another format")
    if stored_key != key or num_token_bytes != len(tokens) or content[FIXED.size :] != tokens:
        raise DamagedBlock("it is another block")
    if num_page_bytes != size:
        raise DamagedBlock("its pages are laid out in another way")
    return int(checksum)


def _move(
    call: Callable[[int, list[memoryview], int], int],
    handle: int,
    pieces: Sequence[memoryview],
    offset: int,
) -> int:
    """Read or write all pieces from `offset` on. Returns the bytes. Raises OSError."""
    at = offset
    rest = list(pieces)
    while rest:
        num_bytes = call(handle, rest[:MAX_PIECES], at)
        if num_bytes <= 0:
            raise OSError("the file ends too soon")
        at += num_bytes
        rest = without_first(rest, num_bytes)
    return at - offset

"""A file to which lines are appended, and which has no part of a line after the process was killed.

A line counts when its end is written: what a killed process has left of a last line is cut off when
the file is opened again. So a line is there once, or not at all.
"""

from __future__ import annotations

import fcntl
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20  # bytes that are read at once


class LineFile:
    """Lines at the end of a file, which is created if it is missing.

    Raises OSError: BlockingIOError while another process appends to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._file, self._end_of_lines())

    def append(self, lines: Sequence[bytes]) -> None:
        """Append lines, each without its line feed. After an exception none of them counts, for
        what was written of them is cut off."""
        end = os.fstat(self._file).st_size
        rest = memoryview(b"".join(line + b"\n" for line in lines))
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, end)
            raise

    def flush(self) -> None:
        """Let what was appended survive a loss of power, too."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _end_of_lines(self) -> int:
        """The length of the file up to the end of its last line."""
        end = os.fstat(self._file).st_size
        while end:
            begin = max(end - CHUNK, 0)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0


def lines_of(path: Path, longest: int = -1) -> Iterator[bytes]:
    """The lines of a file, as `lines_in` gives them. Raises OSError."""
    with path.open("rb") as file:
        yield from lines_in(file, longest)


def lines_in(file: BinaryIO, longest: int = -1) -> Iterator[bytes]:
    """The lines that are not empty, without their ends and without a byte order mark, which
    editors on Windows write. Of a line with more than `longest` bytes only the first `longest + 1`
    are read into memory; -1: there is no bound. Raises OSError."""
    most = longest + 1 if longest >= 0 else -1
    while line := file.readline(most):
        if len(line) == most and not line.endswith(b"\n"):
            _skip_line(file)
        else:
            line = line.removeprefix(BOM_UTF8).strip()
        if line:
            yield line


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
        pass

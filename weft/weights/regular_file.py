"""A regular file whose bytes are read at any offset.

Bytes are read with `pread` into the caller's memory, not mapped: the process keeps no copy of them,
and a file that shrinks meanwhile causes an error, not a signal. Knows no format.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.config.model import BadCheckpoint


class RegularFile:
    """An open file, closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """`label` is the name for error messages. Raises BadCheckpoint unless it is a regular
        file."""
        self.label = label or str(path)
        try:
            # O_NONBLOCK, because opening a FIFO would wait for a writer.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            raise BadCheckpoint(f"{self.label} cannot be opened: {exc.strerror}") from exc
        status = os.fstat(self._file)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise BadCheckpoint(f"{self.label} is not a regular file")

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises BadCheckpoint if the file has too
        few."""
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
        """Let the system read the file from disk in advance, where it can."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

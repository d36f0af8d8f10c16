"""A file whose bytes are read where the caller wants them.

Content is read with `pread` into memory of the caller, not mapped: what was read does not stay in
this process, and a file that shrinks meanwhile gives an error, not a signal. Knows no format.
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
    """It is closed at the end of a `with` block."""

    def __init__(self, path: Path, label: str = "") -> None:
        """`label` is the name for errors. Raises BadCheckpoint unless it is a regular file."""
        self.label = label or str(path)
        try:
            # A FIFO would wait for a writer.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            raise BadCheckpoint(f"{self.label} cannot be opened: {exc.strerror}") from exc
        status = os.fstat(self._file)
        self.num_bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise BadCheckpoint(f"{self.label} is not a regular file")

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises BadCheckpoint if there are not so
        many."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

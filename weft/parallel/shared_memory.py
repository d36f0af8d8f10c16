"""Memory that ranks of one machine share. It has no name: a rank inherits it as an open file, and
it is gone with the last process that has it, whatever becomes of them."""

from __future__ import annotations

import ctypes
import mmap
import os


class SharedSegment:
    """`num_bytes` of zeros at `address`, in this process and in those that have the same file."""

    def __init__(self, file: int) -> None:
        """Of an open file, which this closes."""
        self.num_bytes = os.fstat(file).st_size
        self._map = mmap.mmap(file, self.num_bytes)
        os.close(file)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def set_byte(self, place: int) -> None:
        """Let the byte there be 1, for all that have the memory."""
        self._map[place] = 1


def anonymous_file(num_bytes: int) -> int:
    """The number of an open file without a name. Raises OSError where there is none (Linux has)."""
    file = os.memfd_create("weft-ranks")
    os.ftruncate(file, num_bytes)
    return file

"""Memory that ranks of one machine share. It has no name: a rank inherits it as an open file, and
it is freed when the last process that has it ends, however that process ends."""

from __future__ import annotations

import ctypes
import mmap
import os


class SharedSegment:
    """`num_bytes` of zeros at `address`, in this process and in those that have the same file."""

    def __init__(self, file: int) -> None:
        """Map an open file, and close it."""
        self.num_bytes = os.fstat(file).st_size
        self._map = mmap.mmap(file, self.num_bytes)
        os.close(file)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def set_byte(self, offset: int) -> None:
        """Set the byte at this index to 1, for all processes with this memory."""
        self._map[offset] = 1


def anonymous_file(num_bytes: int) -> int:
    """The descriptor of a new file without a name. Raises OSError on systems other than Linux."""
    file = os.memfd_create("weft-ranks")
    os.ftruncate(file, num_bytes)
    return file

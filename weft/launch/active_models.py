"""How many models of a server compute at present: a number in memory that all of its engines see.

Each engine of a server with several models has threads for all cores, because most of the time one
model alone is busy. While several are, each takes its part: threads of two engines on the same
cores would wait for each other in every operation, since an operation ends when its slowest thread
does. Tokens do not depend on the number of threads.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

NUM_BYTES = 8


class ActiveModels:
    """The front writes the number, the engines read it before each step."""

    def __init__(self, path: Path) -> None:
        """`path`: the file with the number, which is made if it is not there. Raises OSError."""
        self.path = path
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, NUM_BYTES)
            self._number = memoryview(mmap.mmap(file, NUM_BYTES)).cast("q")
        finally:
            os.close(file)

    def set(self, num: int) -> None:
        self._number[0] = num

    def num(self) -> int:
        """Models with open requests, at least 1."""
        return max(self._number[0], 1)

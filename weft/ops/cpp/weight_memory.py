"""Memory for packed weights, cut one behind the other from large pieces of it.

    piece:  |== weight ==|=== weight ===|== weight ==|........ not written: takes no memory |

A product of few rows reads every weight once, and much of that time goes into finding out where
each page of 4 KiB lies. So the system is asked for huge pages, which most weights are too small to
have alone. Knows nothing of what a weight is.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_BYTES = 1 << 26
HUGE_PAGE = 1 << 21
LINE = 64


class WeightMemory:
    """A piece goes back to the system when the last of its tensors is gone, and it is no longer the
    one that is being cut."""

    def __init__(self) -> None:
        self._rest = np.empty(0, dtype=np.uint8)  # of the piece that is being cut

    def zeros(self, num_bytes: int) -> Tensor:
        """[num_bytes] zeros from a multiple of 64 on, with a storage of their own. They take no
        memory until they are written."""
        taken = whole_lines(num_bytes)
        if taken > len(self._rest):
            self._rest = _new_piece(max(taken, PIECE_BYTES))
        cut = self._rest[:num_bytes]
        self._rest = self._rest[taken:]
        return torch.from_numpy(cut)


def whole_lines(num_bytes: int) -> int:
    """The bytes of as many lines of a cache as are begun."""
    return -(-num_bytes // LINE) * LINE


def _new_piece(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros from the beginning of a huge page on."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=private)
    if sys.platform == "linux":
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + num_bytes]

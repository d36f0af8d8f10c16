"""Memory for packed weights, allocated consecutively from large pieces.

    piece:  |== weight ==|=== weight ===|== weight ==|........ not written: takes no memory |

A product of few rows reads every weight once, and spends much of its time on address translation
(TLB misses) with pages of 4 KiB. So pieces ask the system for huge pages; most weights are too
small to fill huge pages of their own. Knows nothing about the content of weights.
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
    """Allocates from pieces. A piece is freed when its last tensor is freed and a newer piece has
    replaced it."""

    def __init__(self) -> None:
        self._rest = np.empty(0, dtype=np.uint8)  # unallocated end of the newest piece

    def zeros(self, num_bytes: int) -> Tensor:
        """[num_bytes] zeros, aligned to 64 bytes, as a tensor with its own storage. They take no
        memory until they are written."""
        taken = rounded_to_lines(num_bytes)
        if taken > len(self._rest):
            self._rest = _new_piece(max(taken, PIECE_BYTES))
        cut = self._rest[:num_bytes]
        self._rest = self._rest[taken:]
        return torch.from_numpy(cut)


def rounded_to_lines(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE


def _new_piece(num_bytes: int) -> NDArray[np.uint8]:
    """[num_bytes] zeros, aligned to a huge page."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=private)
    if sys.platform == "linux":
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(memory, dtype=np.uint8)
    start = -block.ctypes.data % HUGE_PAGE
    return block[start : start + num_bytes]

"""Gives the memory of tensors back to the system, while the tensors stay where they are.

    tensor:      |....=================================....|
    pages:    |  ....|=========|=========|=========|....   |

The whole pages are given back, and read as zeros.

Programs that point to the tensors stay valid. Where a page is written again, the system finds
memory for it again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def is_offered(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"


def give_back(tensors: Iterable[Tensor]) -> int:
    """Give back the whole pages of the tensors. Their content is lost. Returns how many bytes that
    were."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            # Memory of an open file, which processes share, goes back by the first one alone, and
            # is the only one that it takes.
            if libc.madvise(start, end - start, mmap.MADV_REMOVE) and libc.madvise(
                start, end - start, mmap.MADV_DONTNEED
            ):
                raise OSError(ctypes.get_errno(), "madvise")
            total += end - start
    return total

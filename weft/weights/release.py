"""Gives the memory of tensors back to the system, without changing the tensors' addresses.

    tensor:      |....=================================....|
    pages:    |  ....|=========|=========|=========|....   |

Only whole pages are given back; they then read as zeros.

Programs that point to the tensors stay valid. The system allocates a page again when it is written.
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
    """Give back the whole pages of the tensors. Their content is lost. Returns the number of bytes
    given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            # MADV_REMOVE gives back memory of a file that processes share, and fails for other
            # memory; MADV_DONTNEED gives back other memory.
            if libc.madvise(start, end - start, mmap.MADV_REMOVE) and libc.madvise(
                start, end - start, mmap.MADV_DONTNEED
            ):
                raise OSError(ctypes.get_errno(), "madvise")
            total += end - start
    return total

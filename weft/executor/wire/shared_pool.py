"""The memory of a rank's KV pool, shared with another process of the machine: so the process that
schedules reads and writes the K and V of all ranks in place (`--cache-dir`).

    file:  |== K of layer 0 ==|....|== K of layer 1 ==|....      each from a page of the system on

The file has no name; a rank inherits it. Both processes take the same tensors from it in the same
order.
"""

from __future__ import annotations

import math
import mmap
import os

import numpy as np
import torch
from torch import Tensor


class SharedPool:
    """Cuts consecutive tensors from an open file. The file grows."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._end = 0  # of the last tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor: zeros, unless the other process has written there; they take no memory
        until they are written. Raises OSError."""
        assert device.type == "cpu", "processes share the memory of the host"
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.zeros(shape, dtype=dtype)
        begin = self._end
        taken = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end += taken
        if os.fstat(self._file).st_size < self._end:
            os.ftruncate(self._file, self._end)
        memory = mmap.mmap(self._file, taken, offset=begin)
        received = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        return received[:num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """Give no more tensors; existing tensors stay valid."""
        os.close(self._file)

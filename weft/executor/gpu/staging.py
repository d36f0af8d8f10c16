"""How the numbers of a step come to the GPU: all of them in one copy, as int32, out of a ring of pinned buffers.

    step n      | tokens | slots | ... | temperature |      buffer 0, until its copy is through
    step n + 1  | tokens | ...                              buffer 1
    step n + 2                                              buffer 2, and then buffer 0 again

The stream orders everything on the device. What it does not order is the host, which writes the numbers of a later
step while the copy of an earlier one may not have begun: a buffer is written again only when its copy is known to be
through.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.executor.gpu.gpu import Event, Gpu

RING = 3
FIRST_INTS = 1 << 16
ALIGNMENT = 16  # ints: Triton compiles a kernel anew for an address that is no multiple of 16 bytes


class Staging:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers = [gpu.pinned((FIRST_INTS,), torch.int32) for _ in range(RING)]
        self._copied: list[Event | None] = [None] * RING
        self._turn = 0

    def send(self, arrays: Sequence[IntArray | LongArray], target: Tensor | None = None) -> Tensor:
        """Copy the arrays, whose values fit int32, to the device, each where `places` says: into `target`, or into new
        memory. Returns when the copy has been asked for; the arrays may change then."""
        begins, total = places([len(array) for array in arrays])
        turn, self._turn = self._turn, (self._turn + 1) % RING
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        if total > len(self._buffers[turn]):
            self._buffers[turn] = self._gpu.pinned((2 * total,), torch.int32)
        host = self._buffers[turn][:total]
        flat = host.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            flat[begin : begin + len(array)] = array
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self._gpu.device)
        self._gpu.copy(target[:total], host)
        self._copied[turn] = self._gpu.record()
        return target


def places(lens: Sequence[int]) -> tuple[list[int], int]:
    """Where each array begins in the packed one, and where the last one ends."""
    ends = list(accumulate(-(-num // ALIGNMENT) * ALIGNMENT for num in lens))
    return [0, *ends[:-1]] if ends else [], ends[-1] if ends else 0


def parts(packed: Tensor, lens: Sequence[int]) -> list[Tensor]:
    """The arrays of `lens` in a packed tensor."""
    begins, _ = places(lens)
    return [packed[begin : begin + num] for begin, num in zip(begins, lens, strict=True)]

"""Copies of KV between the pool and the memory of the host, for `--cache-host-gb`.

The host memory has a copy of each of the pool's tensors, with its own pages. For a GPU it is
pinned, and copies run on a stream of their own, beside the steps; on a CPU these are plain copies,
for tests and comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray


class CopyStream:
    """A stream of a GPU besides that of the steps; on a CPU, none."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self.is_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enter(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until all copies on it are complete."""
        if self._stream is not None:
            self._stream.synchronize()


class HostMemory:
    """The `HostCopies` of tensors [slots, ...], in pages of `page_size` slots. Called from one
    thread. Source pages must not change during a copy, and no launched step may read target
    pages."""

    def __init__(self, tensors: Sequence[Tensor], page_size: int, num_host_pages: int) -> None:
        self._pool = [tensor for tensor in tensors if len(tensor)]
        self._page_size = page_size
        self.num_host_pages = num_host_pages
        self._stream = CopyStream(self._pool[0].device)
        # [num_host_pages * page_size, ...] for each tensor of the pool
        self.tensors = [
            torch.empty(
                (num_host_pages * page_size, *tensor.shape[1:]),
                dtype=tensor.dtype,
                pin_memory=self._stream.is_gpu,
            )
            for tensor in self._pool
        ]
        self.page_bytes = page_bytes(tensors, page_size)

    @torch.inference_mode()
    def save(self, pages: IntArray, places: IntArray) -> None:
        with self._stream.enter():
            slots = self._slots(pages)
            for pool, host in zip(self._pool, self.tensors, strict=True):
                # Gathered on the device: one copy for each run of places instead of one for each
                # page.
                gathered = pool.index_select(0, slots)
                for begin, end, at in self._runs(places):
                    host[begin:end].copy_(gathered[at : at + end - begin], non_blocking=True)
        self._stream.wait()

    @torch.inference_mode()
    def load(self, places: IntArray, pages: IntArray) -> None:
        with self._stream.enter():
            slots = self._slots(pages)
            for pool, host in zip(self._pool, self.tensors, strict=True):
                shape = (len(slots), *pool.shape[1:])
                gathered = torch.empty(shape, dtype=pool.dtype, device=pool.device)
                for begin, end, at in self._runs(places):
                    gathered[at : at + end - begin].copy_(host[begin:end], non_blocking=True)
                pool.index_copy_(0, slots, gathered)
        self._stream.wait()

    def _slots(self, pages: IntArray) -> Tensor:
        """The slots of pages, on the pool's device."""
        offsets = np.arange(self._page_size, dtype=np.int64)
        slots = pages[:, None] * np.int64(self._page_size) + offsets
        return torch.from_numpy(slots.ravel()).to(self._pool[0].device)

    def _runs(self, places: IntArray) -> Iterator[tuple[int, int, int]]:
        """Slots [begin, end) of each run of consecutive places, and the number of slots before
        it."""
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        at = 0
        for run in np.split(places, cuts):
            begin = int(run[0]) * self._page_size
            length = len(run) * self._page_size
            yield begin, begin + length, at
            at += length


def page_bytes(tensors: Sequence[Tensor], page_size: int) -> int:
    """Bytes of a page in all tensors [slots, ...]."""
    sizes = [tensor[0].nbytes for tensor in tensors if len(tensor)]
    return sum(sizes) * page_size

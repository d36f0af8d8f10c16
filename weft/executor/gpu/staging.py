"""Copies the numbers of a step to the GPU: all in one copy, as int32, from a ring of buffers.

        step n      | tokens | slots | ... | temperature |      buffer 0, until its copy is complete
    step n + 1  | tokens | ...                              buffer 1
    step n + 2                                              buffer 2, and then buffer 0 again

The stream orders everything on the device. It does not order the host, which may write the numbers
of a later step before the copy of an earlier one has begun. So a buffer is written again only after
its copy is known to be complete.

Every array begins at a multiple of 16 ints, because Triton compiles another kernel for an address
that is not a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.executor.backend import DeviceLayout
from weft.executor.gpu.gpu import Gpu, GpuEvent
from weft.executor.gpu.layout import Tiling
from weft.executor.inputs import UploadedStep
from weft.ops.noise import row_keys
from weft.ops.sampling import SamplingTensors, UploadedSampling
from weft.plan.step import Plan, Sampling, SamplingColumns

RING = 3
FIRST_INTS = 1 << 16
ALIGNMENT = 16  # ints


class H2DBuffer:
    """A ring of pinned buffers, from which packed arrays are copied to the device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers = [gpu.pinned((FIRST_INTS,), torch.int32) for _ in range(RING)]
        self._copied: list[GpuEvent | None] = [None] * RING
        self._slot = 0

    def send(self, arrays: Sequence[IntArray | LongArray], target: Tensor | None = None) -> Tensor:
        """Copy arrays whose values fit int32 to the device, each at its offset (`offsets`).

        The target is `target`, or new memory. Returns when the copy is on the stream; the arrays
        may change afterwards.
        """
        begins, total = offsets([len(array) for array in arrays])
        slot = self._slot
        self._slot = (slot + 1) % RING
        copied = self._copied[slot]
        # That copy is RING steps old, so this waits only if the host is far ahead of the device.
        if copied is not None:
            copied.synchronize()
        # A larger buffer may replace this one, because its last copy is complete.
        if total > len(self._buffers[slot]):
            self._buffers[slot] = self._gpu.pinned((2 * total,), torch.int32)
        host = self._buffers[slot][:total]
        flat = host.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            flat[begin : begin + len(array)] = array
        if target is None:
            target = torch.empty(
                total,
                dtype=torch.int32,
                device=self._gpu.device,
            )
        self._gpu.copy(target[:total], host)
        self._copied[slot] = self._gpu.record()
        return target


class GpuUploader:
    """The `StepUploader` of a GPU. `tiling` makes the layout of the arrays that attention reads;
    without it, the backend makes and copies its own layout."""

    def __init__(self, buffer: H2DBuffer, tiling: Tiling | None) -> None:
        self._buffer = buffer
        self._tiling = tiling

    def upload(self, columns: Sequence[IntArray | LongArray], plan: Plan) -> UploadedStep:
        if self._tiling is None:
            arrays = [*columns, *draw_columns(plan.sampling)]
            lens = [len(array) for array in arrays]
            packed = self._buffer.send(arrays)
            there = split(packed, lens)
            return UploadedStep(
                columns=as_indices(packed, lens[: len(columns)]),
                layout=None,
                draws=placed(plan.sampling, there[len(columns) :]),
            )
        size = self._tiling.size(plan.lens)
        layout = self._tiling.lay_out(
            plan.rows,
            plan.starts,
            plan.lens,
            plan.slots,
            size,
        )
        arrays = [*columns, *layout, *draw_columns(plan.sampling)]
        lens = [len(array) for array in arrays]
        packed = self._buffer.send(arrays)
        there = split(packed, lens)
        end = len(columns) + len(layout)
        return UploadedStep(
            columns=as_indices(packed, lens[: len(columns)]),
            layout=DeviceLayout(tuple(there[len(columns) : end]), size),
            draws=placed(plan.sampling, there[end:]),
        )

    def send(self, arrays: Sequence[IntArray | LongArray], target: Tensor) -> None:
        """Copy the arrays to fixed memory, each at its offset (`offsets`)."""
        self._buffer.send(arrays, target)

    def as_they_are(self, arrays: Sequence[IntArray | LongArray]) -> list[Tensor]:
        """The arrays on the device, int32."""
        return split(self._buffer.send(arrays), [len(array) for array in arrays])

    def to_device(self, arrays: Sequence[IntArray | LongArray]) -> list[Tensor]:
        lens = [len(array) for array in arrays]
        return as_indices(self._buffer.send(arrays), lens)


def offsets(lens: Sequence[int]) -> tuple[list[int], int]:
    """The begin of each array in the packed one, and the end of the last one."""
    if not lens:
        return [], 0
    ends = list(accumulate(-(-num // ALIGNMENT) * ALIGNMENT for num in lens))
    return [0, *ends[:-1]], ends[-1]


def split(packed: Tensor, lens: Sequence[int]) -> list[Tensor]:
    """The arrays of `lens` in a packed tensor, as views."""
    begins, _ = offsets(lens)
    return [packed[begin : begin + num] for begin, num in zip(begins, lens, strict=True)]


def as_indices(
    packed: Tensor,
    lens: Sequence[int],
    skip: int = 0,
) -> list[Tensor]:
    """The arrays after the first `skip` as int64, torch's type of indices, by one operation."""
    # One conversion of the whole piece, then views: a launch for each array would cost more.
    begins, end = offsets(lens)
    return split(packed[begins[skip] : end].long(), lens[skip:])


def draw_columns(sampling: Sampling) -> Sequence[IntArray]:
    """The numbers for draws, floats as their bits; empty if every request is greedy."""
    if sampling.is_greedy:
        return ()
    *numbers, seeds, positions = sampling
    return (*[_bits(column) for column in numbers], row_keys(seeds, positions).ravel())


def placed(sampling: Sampling, there: Sequence[Tensor]) -> UploadedSampling | None:
    """`sampling` with its `draw_columns` on the device, `there`."""
    if not there:
        return None
    *bits, keys = there
    numbers: dict[str, Tensor] = {}
    for name, column in zip(SamplingColumns._fields, bits, strict=False):
        is_float = getattr(sampling, name).dtype == np.float32
        numbers[name] = column.view(torch.float32) if is_float else column
    on_host = {name: getattr(sampling, name) for name in sampling.__slots__}
    return UploadedSampling(**on_host, device=SamplingTensors(**numbers, keys=keys.view(-1, 2)))


def _bits(values: np.ndarray) -> IntArray:
    return np.ascontiguousarray(values).view(np.int32)

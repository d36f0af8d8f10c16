"""All that a GPU must know of one step, in the one copy that `staging.py` makes: rows and tokens, what attention has
laid out, and how to sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.executor.attention_layout import Tiling
from weft.executor.backend import Shipped
from weft.executor.gpu.staging import Staging, parts, places
from weft.ops.noise import row_keys
from weft.ops.sampling import DeviceDraws, PlacedDraws
from weft.plan.step import Plan, Sampling


class Cargo(NamedTuple):
    """A step's numbers on the device."""

    columns: list[Tensor]  # int64
    attention: Shipped | None
    draws: PlacedDraws | None  # None: every request takes the likeliest token


class Packing:
    """`tiling` lays out what attention reads; None: the backend itself plans, and copies what it needs."""

    def __init__(self, staging: Staging, tiling: Tiling | None) -> None:
        self._staging = staging
        self._tiling = tiling

    def ship(self, columns: Sequence[IntArray | LongArray], plan: Plan) -> Cargo:
        layout: Sequence[IntArray] = ()
        if self._tiling is not None:
            size = self._tiling.size(plan.lens)
            layout = self._tiling.lay_out(plan.rows, plan.starts, plan.lens, plan.slots, size)
        arrays = [*columns, *layout, *draw_columns(plan.sampling)]
        lens = [len(array) for array in arrays]
        packed = self._staging.send(arrays)
        there = parts(packed, lens)
        num, behind = len(columns), len(columns) + len(layout)
        return Cargo(
            columns=wide(packed, lens[:num]),
            attention=Shipped(tuple(there[num:behind]), size) if self._tiling is not None else None,
            draws=placed(plan.sampling, there[behind:]),
        )

    def send(self, arrays: Sequence[IntArray | LongArray], target: Tensor) -> None:
        """Copy them to a fixed place, each where `places` says."""
        self._staging.send(arrays, target)

    def to_device(self, arrays: Sequence[IntArray | LongArray]) -> list[Tensor]:
        """As int64."""
        return wide(self._staging.send(arrays), [len(array) for array in arrays])


def wide(packed: Tensor, lens: Sequence[int], skip: int = 0) -> list[Tensor]:
    """The arrays behind the first `skip` of them as int64, as torch wants indices, by one operation."""
    begins, end = places(lens)
    return parts(packed[begins[skip] : end].long(), lens[skip:])


def draw_columns(sampling: Sampling) -> Sequence[IntArray]:
    """What is needed to draw tokens, floats by their bits; nothing if every request takes the likeliest."""
    if sampling.is_greedy:
        return ()
    floats = (sampling.temperature, sampling.top_p, sampling.min_p)
    bits = (np.ascontiguousarray(values, np.float32).view(np.int32) for values in floats)
    return *bits, sampling.top_k, row_keys(sampling.seeds, sampling.positions).ravel()


def placed(sampling: Sampling, there: Sequence[Tensor]) -> PlacedDraws | None:
    """`there` are the `draw_columns` on the device."""
    if not there:
        return None
    temperature, top_p, min_p = (column.view(torch.float32) for column in there[:3])
    device = DeviceDraws(temperature, there[3], top_p, min_p, there[4].view(-1, 2))
    host = (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.positions,
    )
    return PlacedDraws(*host, device)

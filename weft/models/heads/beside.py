"""What heads read: two parts of a token beside each other, each normed by itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.models.layers.norm import RmsNorm
from weft.ops.protocol import Ops


class NormedPart(NamedTuple):
    values: Tensor  # [T, size]
    norm: RmsNorm


def beside(ops: Ops, left: NormedPart, right: NormedPart) -> Tensor:
    """The two parts, normed, as [T, 2 * size]."""
    size = left.values.shape[1]
    both = ops.space(left.values, 2 * size)
    halves = (both[:, :size], both[:, size:])
    for part, half in zip((left, right), halves, strict=True):
        copy_rows(ops, part.values, half)
    for part, half in zip((left, right), halves, strict=True):
        ops.norm_overwrites(half, part.norm.norm)
    return both


def copy_rows(ops: Ops, x: Tensor, out: Tensor) -> None:
    """Copy x [T, size] into rows [T, size] that may stand apart."""
    ops.copy(x.unsqueeze(1), out.unsqueeze(1))

"""Weights in few bits: codes, with scales for groups of inputs.

A weight is

    scale * (code - offset) + min     or     scale * table[code] + min

where scale and min belong to an output and a group of consecutive inputs; there may be no min.
Knows no file format: the readers of files convert their tensors to `Codes`, and a matrix
(`protocol.Matrix`) stores these unchanged if it can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COARSE = 256  # inputs that share a coarse scale

# Values of four-bit codes in formats with uneven steps.
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class CodeFormat(NamedTuple):
    """The encoding of all codes of a matrix."""

    bits: int  # 2: codes are 0..3; 3: 0..7; 4: 0..15; 6: 0..63; 8: 0..255
    group: int  # inputs that share a scale: 16, 32, 64 or 128; 0: all of an output
    offset: int = 0  # subtracted from each code, if there is no table
    table: tuple[int, ...] = ()  # values of the codes of three or four bits; (): no table
    has_mins: bool = False
    scale_type: torch.dtype = torch.float32  # or float16, bfloat16: holds every scale and min
    is_coarse: bool = False  # scales and mins are int8, times a coarse factor
    unit: float = 1.0  # a power of two by which coarse factors are multiplied


class Scales(NamedTuple):
    """One number for each output and group: `fine`, or `fine` times `coarse` in float32."""

    fine: Tensor  # [n, groups] float16, bfloat16 or float32; int8 if there is a coarse factor
    coarse: Tensor | None = None  # [n, ceil(in / COARSE)] float16

    def values(self, group: int, unit: float = 1.0) -> Tensor:
        """[n, groups] float32; `group` and `unit` of their format."""
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        factors = (self.coarse.float() * unit).repeat_interleave(COARSE // group, dim=1)
        return fine * factors[:, : fine.shape[1]]

    def of(self, rows: slice) -> Scales:
        """The scales of some outputs."""
        return Scales(self.fine[rows], None if self.coarse is None else self.coarse[rows])

    def rows(self, index: Tensor | slice) -> Scales:
        coarse = None if self.coarse is None else self.coarse[index]
        return Scales(self.fine[index], coarse)


class Codes(NamedTuple):
    """Rows of a matrix."""

    format: CodeFormat
    values: Tensor  # [n, in] uint8
    scales: Scales
    mins: Scales | None = None
    # The input of each column of `values`, [in] int32; None: the columns are in input order.
    order: Tensor | None = None

    def of(self, rows: slice) -> Codes:
        """Some of the rows."""
        mins = None
        if self.mins is not None:
            mins = self.mins.of(rows)
        return Codes(self.format, self.values[rows], self.scales.of(rows), mins, self.order)

    def dequantized(self) -> Tensor:
        """The weights [n, in], computed in float32, from left to right in the formula above."""
        format = self.format
        in_size = self.values.shape[1]
        if format.table:
            table = torch.tensor(format.table, dtype=torch.float32, device=self.values.device)
            steps = table[self.values.int()]
        else:
            steps = self.values.float() - format.offset
        weights = steps * self._by_input(self.scales, in_size)
        if self.mins is not None:
            weights += self._by_input(self.mins, in_size)
        if self.order is None:
            return weights
        by_input = torch.empty_like(weights)
        by_input[:, self.order] = weights
        return by_input

    def _by_input(self, scales: Scales, in_size: int) -> Tensor:
        """[n, groups] -> [n, in], or [n, 1] if all inputs share a scale."""
        group = self.format.group
        if group == 0:
            return scales.values(in_size)
        values = scales.values(group, self.format.unit)
        return values.repeat_interleave(group, dim=1)[:, :in_size]


def codes_of_int8(rows: Tensor, scales: Tensor) -> Codes:
    """Codes of int8 rows [n, in] with one float32 scale per row, [n]."""
    values = rows.view(torch.uint8) ^ 128
    return Codes(CodeFormat(8, 0, offset=128), values, Scales(scales[:, None]))

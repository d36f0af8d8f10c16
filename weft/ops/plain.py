"""`Ops` in plain torch, on any device: the specification of every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.elementwise import rms_norm, silu_and_mul
from weft.ops.protocol import Matrix, Norm
from weft.ops.quantize import GROUP, dequantize, quantize_int4, quantize_int8


class PlainMatrix:
    """Rows in the type of the model, one part below the other."""

    def __init__(
        self, in_size: int, sizes: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sizes = sizes
        self._weight = torch.empty(sum(sizes), in_size, dtype=dtype, device=device)
        self.bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None

    @property
    def weight(self) -> Tensor:
        """[out, in]"""
        return self._weight

    def rows(self, index: Tensor) -> Tensor:
        """index [n] -> [n, in]"""
        return F.embedding(index, self._weight)

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self._weight] if self.bias is None else [self._weight, self.bias]

    def put(self, part: int, rows: Tensor, start: int = 0) -> None:
        self._part(self._weight, part)[start : start + len(rows)].copy_(rows)

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        return self._part(self._weight, part)[start:stop].clone()

    def put_bias(self, part: int, values: Tensor) -> None:
        assert self.bias is not None
        self._part(self.bias, part).copy_(values)

    def get_bias(self, part: int) -> Tensor:
        assert self.bias is not None
        return self._part(self.bias, part).clone()

    def _part(self, whole: Tensor, part: int) -> Tensor:
        return whole.split_with_sizes(self.sizes)[part]


class QuantizedMatrix(PlainMatrix):
    """Kept in few bits and widened at each use: saves memory, not time."""

    def __init__(
        self, in_size: int, sizes: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device, bits: int
    ) -> None:
        super().__init__(0, sizes, bias, dtype, device)
        self._in_size, self._dtype, self._bits = in_size, dtype, bits
        num_rows = sum(sizes)
        scales = (num_rows,) if bits == 8 else (num_rows, -(-in_size // GROUP))
        self._integers = torch.empty(num_rows, in_size, dtype=torch.int8, device=device)
        self._scales = torch.empty(scales, device=device)

    @property
    def weight(self) -> Tensor:
        return dequantize(self._integers, self._scales).to(self._dtype)

    def rows(self, index: Tensor) -> Tensor:
        return dequantize(self._integers[index], self._scales[index]).to(self._dtype)

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self._integers, self._scales, *super().kept]

    def put(self, part: int, rows: Tensor, start: int = 0) -> None:
        end = start + len(rows)
        assert end <= self.sizes[part]
        assert rows.shape[1] == self._in_size
        quantize = quantize_int8 if self._bits == 8 else quantize_int4
        integers, scales = quantize(rows.to(self._integers.device))
        self._part(self._integers, part)[start:end].copy_(integers)
        self._part(self._scales, part)[start:end].copy_(scales)

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        integers, scales = self._part(self._integers, part)[start:stop], self._part(self._scales, part)[start:stop]
        return dequantize(integers, scales).to(self._dtype)


class PlainOps:
    """Activations have the type of the weights. `bits`: 8 or 4 to quantise weights, 0 to keep them as they are."""

    def __init__(self, dtype: torch.dtype, device: torch.device, bits: int = 0) -> None:
        self._dtype, self._device, self._bits = dtype, device, bits
        self.kept: list[Tensor] = []

    def vector(self, size: int) -> Tensor:
        values = torch.empty(size, dtype=self._dtype, device=self._device)
        self.kept.append(values)
        return values

    def matrix(
        self, in_size: int, sizes: tuple[int, ...], *, bias: bool = False, gated: bool = False, precise: bool = False
    ) -> Matrix:
        matrix = self._matrix(in_size, sizes, bias, 8 if precise and self._bits else self._bits)
        self.kept += matrix.kept
        return matrix

    def embed(self, tokens: Tensor, table: Matrix, vectors: Tensor | None = None) -> Tensor:
        if vectors is None:
            return _plain(table).rows(tokens)
        x = _plain(table).rows(tokens.clamp(min=0))
        where = (tokens < 0)[:, None]
        return torch.where(where, vectors[(-1 - tokens).clamp(min=0)].to(x.dtype), x)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, *norm)

    def linear(self, x: Tensor, weight: Matrix, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        y = F.linear(x if norm is None else rms_norm(x, *norm), _plain(weight).weight, _plain(weight).bias)
        return y if add is None else y.add_(add)

    def gated(self, x: Tensor, weight: Matrix, *, norm: Norm | None = None) -> Tensor:
        return silu_and_mul(self.linear(x, weight, norm=norm))

    def logits(self, x: Tensor, weight: Matrix, norm: Norm) -> Tensor:
        return self.linear(x, weight, norm=norm).float()

    def _matrix(self, in_size: int, sizes: tuple[int, ...], bias: bool, bits: int) -> PlainMatrix:
        if bits:
            return QuantizedMatrix(in_size, sizes, bias, self._dtype, self._device, bits)
        return PlainMatrix(in_size, sizes, bias, self._dtype, self._device)


def _plain(matrix: Matrix) -> PlainMatrix:
    return cast(PlainMatrix, matrix)

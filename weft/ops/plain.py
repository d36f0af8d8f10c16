"""`Ops` in plain torch, on any device: the specification of every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.elementwise import rms_norm, silu_and_mul
from weft.ops.protocol import Matrix, Norm
from weft.ops.quantize import (
    GROUP,
    KEPT_IN,
    QUANTIZE,
    dequantize,
    quantize_fp8,
    widened,
)


class PlainMatrix:
    """Rows in the type of the model, one part below the other."""

    format = ""  # in which they are quantised

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self._weight = torch.empty(
            sum(sizes),
            in_size,
            dtype=dtype,
            device=device,
        )
        self.bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None

    @property
    def weight(self) -> Tensor:
        """[out, in]"""
        return self._weight

    def rows(self, index: Tensor) -> Tensor:
        """index [n] -> [n, in]"""
        return F.embedding(index, self._weight)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self._weight] if self.bias is None else [self._weight, self.bias]

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        target = self._part(self._weight, part)[start : start + len(rows)]
        target.copy_(widened(rows, scales))

    def keep_as(self, part: int, format: CodeFormat) -> None:
        """Codes are widened here."""

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        self.put(part, codes.dequantized(), start)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
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
    """Kept in few bits: int8, int4 or fp8. What is read as `weight` is widened at each use, which
    saves memory, not time."""

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
    ) -> None:
        super().__init__(
            0,
            sizes,
            bias,
            dtype,
            device,
        )
        self.format = format
        self._in_size = in_size
        self._dtype = dtype
        num_rows = sum(sizes)
        scales = (num_rows, -(-in_size // GROUP)) if format == "int4" else (num_rows,)
        self.values = torch.empty(
            num_rows,
            in_size,
            dtype=KEPT_IN[format],
            device=device,
        )
        self.scales = torch.empty(scales, device=device)

    @property
    def weight(self) -> Tensor:
        return dequantize(self.values, self.scales).to(self._dtype)

    def rows(self, index: Tensor) -> Tensor:
        return dequantize(self.values[index], self.scales[index]).to(self._dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.values, self.scales, *super().tensors]

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        end = start + len(rows)
        assert end <= self.sizes[part]
        assert rows.shape[1] == self._in_size
        if scales is None or self.format == "int4" or rows.dtype != self.values.dtype:
            rows = widened(rows, scales).to(self.values.device)
            rows, scales = QUANTIZE[self.format](rows)
        self._part(self.values, part)[start:end].copy_(rows)
        self._part(self.scales, part)[start:end].copy_(scales)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        values = self._part(self.values, part)[start:stop]
        scales = self._part(self.scales, part)[start:stop]
        return dequantize(values, scales).to(self._dtype)


class PlainOps:
    """Activations have the type of the weights. `format`: int8, int4 or fp8 to quantise weights, ""
    to keep them as they are. With fp8 the inputs of products are rounded to fp8, too, row by
    row."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        format: str = "",
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._format = format
        self.tensors: list[Tensor] = []

    def vector(self, size: int) -> Tensor:
        values = torch.empty(
            size,
            dtype=self._dtype,
            device=self._device,
        )
        self.tensors.append(values)
        return values

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix:
        matrix = self._matrix(
            in_size, sizes, bias, "int8" if precise and self._format else self._format
        )
        self.tensors += matrix.tensors
        return matrix

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
    ) -> Tensor:
        if vectors is None:
            return _plain(table).rows(tokens)
        # A token below 0 looks up row 0, which its vector then replaces.
        rows = _plain(table).rows(tokens.clamp(min=0))
        index = (-1 - tokens).clamp(min=0)
        is_vector = (tokens < 0)[:, None]
        return torch.where(is_vector, vectors[index].to(rows.dtype), rows)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, *norm)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        matrix = _plain(weight)
        if matrix.format == "fp8":
            values, scales = quantize_fp8(x)
            x = dequantize(values, scales).to(x.dtype)
        return F.linear(x, matrix.weight, matrix.bias)

    def gated(self, x: Tensor, weight: Matrix) -> Tensor:
        return silu_and_mul(self.linear(x, weight))

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        return self.linear(x, weight).float()

    def computed(self, x: Tensor) -> Tensor:
        return x

    def _matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        format: str,
    ) -> PlainMatrix:
        if format:
            return QuantizedMatrix(
                in_size,
                sizes,
                bias,
                self._dtype,
                self._device,
                format,
            )
        return PlainMatrix(
            in_size,
            sizes,
            bias,
            self._dtype,
            self._device,
        )


def _plain(matrix: Matrix) -> PlainMatrix:
    return cast(PlainMatrix, matrix)

"""`Ops` on a GPU: products by torch (cuBLAS), all else by our kernels. `ops/plain.py` is the specification.

The residual stream is added within the product that ends a block (`linear(add=)`): no kernel reads it once more.
Weights may be kept in eight bits; activations then are quantised in the kernel that norms them.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.plain import PlainMatrix, QuantizedMatrix
from weft.ops.protocol import Matrix, Norm
from weft.ops.triton.elementwise import quantize_rows, rms_norm, scaled, silu_and_mul
from weft.ops.triton.matrix import FP8, LEAST_ROWS, STEP, EightBitMatrix

FORMATS = ("", "fp8", "int8", "int4")


class TritonOps:
    """Activations have the type of the model. `format` of the weights: as they are, fp8, int8, or int4, which is
    widened at each use and so saves memory alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device, format: str = "") -> None:
        """Raises ValueError for a format that there is not."""
        if format not in FORMATS:
            raise ValueError(f"weights cannot be kept in {format}; they can in {', '.join(FORMATS[1:])}")
        self._dtype, self._device, self._format = dtype, device, format
        self.kept: list[Tensor] = []

    def vector(self, size: int) -> Tensor:
        self.kept.append(torch.empty(size, dtype=self._dtype, device=self._device))
        return self.kept[-1]

    def matrix(
        self, in_size: int, sizes: tuple[int, ...], *, bias: bool = False, gated: bool = False, precise: bool = False
    ) -> Matrix:
        matrix = self._matrix(in_size, sizes, bias, "int8" if precise and self._format == "int4" else self._format)
        self.kept += matrix.kept
        return matrix

    def embed(self, tokens: Tensor, table: Matrix, vectors: Tensor | None = None) -> Tensor:
        if vectors is None:
            return _ours(table).rows(tokens)
        x = _ours(table).rows(tokens.clamp(min=0))
        return torch.where((tokens < 0)[:, None], vectors[(-1 - tokens).clamp(min=0)].to(x.dtype), x)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm)

    def linear(self, x: Tensor, weight: Matrix, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        matrix = _ours(weight)
        if isinstance(matrix, EightBitMatrix):
            product = _int8_product if matrix.values.dtype == torch.int8 else _fp8_product
            return product(x, matrix, norm, add)
        if norm is not None:
            x = rms_norm(x, norm)
        if add is None:
            return F.linear(x, matrix.weight, matrix.bias)
        if matrix.bias is not None:
            add += matrix.bias
        return add.addmm_(x, matrix.weight.t())

    def gated(self, x: Tensor, weight: Matrix, *, norm: Norm | None = None) -> Tensor:
        return silu_and_mul(self.linear(x, weight, norm=norm))

    def logits(self, x: Tensor, weight: Matrix, norm: Norm) -> Tensor:
        return self.linear(x, weight, norm=norm).float()

    def _matrix(self, in_size: int, sizes: tuple[int, ...], bias: bool, format: str) -> PlainMatrix | EightBitMatrix:
        if format == "int4":
            return QuantizedMatrix(in_size, sizes, bias, self._dtype, self._device, bits=4)
        if not format or in_size % STEP or sum(sizes) % STEP:  # what the products do not take stays as it is
            return PlainMatrix(in_size, sizes, bias, self._dtype, self._device)
        return EightBitMatrix(in_size, sizes, bias, FP8 if format == "fp8" else torch.int8, self._dtype, self._device)


def _fp8_product(x: Tensor, weight: EightBitMatrix, norm: Norm | None, add: Tensor | None) -> Tensor:
    """In bfloat16, which is all that the product gives with scales by rows."""
    values, scales = quantize_rows(x, FP8, norm)
    y = torch._scaled_mm(values, weight.values.t(), scales[:, None], weight.scales[None], out_dtype=torch.bfloat16)
    if weight.bias is not None:
        y += weight.bias
    return y.to(x.dtype) if add is None else add.add_(y)


def _int8_product(x: Tensor, weight: EightBitMatrix, norm: Norm | None, add: Tensor | None) -> Tensor:
    values, scales = quantize_rows(x, torch.int8, norm, LEAST_ROWS)
    sums = torch._int_mm(values, weight.values.t())
    out = torch.empty(len(x), len(weight.scales), dtype=x.dtype, device=x.device) if add is None else add
    return scaled(sums, scales, weight.scales, weight.bias, out, add is not None)


def _ours(matrix: Matrix) -> PlainMatrix | EightBitMatrix:
    return cast(PlainMatrix | EightBitMatrix, matrix)

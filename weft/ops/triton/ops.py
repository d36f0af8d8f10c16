"""`Ops` on a GPU: products by torch (cuBLAS), all else by our kernels. `ops/plain.py` is the specification.

The residual stream is added within the product that ends a block (`linear(add=)`): no kernel reads it once more.
Weights may be kept in eight bits; activations then are quantised, row by row, in the kernel that norms them. Products
of eight bits are torch's, and take sizes that are multiples of `STEP`.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.plain import PlainMatrix, QuantizedMatrix
from weft.ops.protocol import Matrix, Norm
from weft.ops.quantize import FP8
from weft.ops.triton.elementwise import quantize_rows, rms_norm, scaled, silu_and_mul

FORMATS = ("", "fp8", "int8", "int4")
STEP = 16
LEAST_ROWS = 32  # torch's product of int8 wants more than 16 on a GPU


class TritonOps:
    """Activations have the type of the model. `format` of the weights: as they are, fp8, int8, or int4, which is
    widened at each use and so saves memory alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device, format: str = "") -> None:
        """Raises ValueError for a format that there is not."""
        if format not in FORMATS:
            raise ValueError(
                f"weights cannot be kept in {format}; they can in {', '.join(FORMATS[1:])}"
            )
        self._dtype, self._device, self._format = dtype, device, format
        self._one = torch.ones(1, 1, device=device)  # a scale
        self._scales_rows = _scales_rows(device)
        self.tensors: list[Tensor] = []

    def vector(self, size: int) -> Tensor:
        self.tensors.append(torch.empty(size, dtype=self._dtype, device=self._device))
        return self.tensors[-1]

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

    def embed(self, tokens: Tensor, table: Matrix, vectors: Tensor | None = None) -> Tensor:
        if vectors is None:
            return _ours(table).rows(tokens)
        x = _ours(table).rows(tokens.clamp(min=0))
        return torch.where(
            (tokens < 0)[:, None], vectors[(-1 - tokens).clamp(min=0)].to(x.dtype), x
        )

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm)

    def linear(
        self, x: Tensor, weight: Matrix, *, norm: Norm | None = None, add: Tensor | None = None
    ) -> Tensor:
        matrix = _ours(weight)
        if isinstance(matrix, QuantizedMatrix) and matrix.format != "int4":
            return self._eight_bits(x, matrix, norm, add)
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

    def _matrix(self, in_size: int, sizes: tuple[int, ...], bias: bool, format: str) -> PlainMatrix:
        whole_steps = not in_size % STEP and not sum(sizes) % STEP
        if format == "int4" or (format and whole_steps):
            return QuantizedMatrix(in_size, sizes, bias, self._dtype, self._device, format)
        return PlainMatrix(in_size, sizes, bias, self._dtype, self._device)

    def _eight_bits(
        self, x: Tensor, weight: QuantizedMatrix, norm: Norm | None, add: Tensor | None
    ) -> Tensor:
        """The product scales rows and outputs itself, or a kernel does behind it, with whatever is to be added. Sums
        of fp8 are given in bfloat16, which no sum of theirs is too large for."""
        transposed = weight.values.t()
        if weight.format == "int8":
            values, scales = quantize_rows(x, torch.int8, norm, LEAST_ROWS)
            sums = torch._int_mm(values, transposed)
        else:
            values, scales = quantize_rows(x, FP8, norm)
            if self._scales_rows and add is None and weight.bias is None:
                by_row, by_output = scales[:, None], weight.scales[None]
                return torch._scaled_mm(
                    values, transposed, by_row, by_output, out_dtype=torch.bfloat16
                ).to(x.dtype)
            sums = torch._scaled_mm(
                values, transposed, self._one, self._one, out_dtype=torch.bfloat16
            )
        out = (
            torch.empty(len(x), len(weight.scales), dtype=x.dtype, device=x.device)
            if add is None
            else add
        )
        return scaled(sums, scales, weight.scales, weight.bias, out, add is not None)


def _scales_rows(device: torch.device) -> bool:
    """Whether torch's product of fp8 takes a scale for each row: cuBLAS does not on the GPUs of sm_110 and sm_120."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (11, 0)


def _ours(matrix: Matrix) -> PlainMatrix:
    return cast(PlainMatrix, matrix)

"""Weights in eight bits that torch's own products read: int8 and float8 (e4m3), with a scale for each output.

Activations are quantised row by row as they come, as by the CPU kernels. `ops/quantize.py` is the specification of
int8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.quantize import quantize_int8

STEP = 16  # sizes that the products take are multiples of it
LEAST_ROWS = 32  # torch's product of int8 wants more than 16 on a GPU
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class EightBitMatrix:
    """W [out, in] with its bias: in int8 or float8, W about `values` * `scales`."""

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        kept_as: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`kept_as`: torch.int8 or float8_e4m3fn; `dtype` of activations and of the bias."""
        self.sizes, self.dtype = sizes, dtype
        self.values = torch.empty(sum(sizes), in_size, dtype=kept_as, device=device)
        self.scales = torch.empty(sum(sizes), device=device)
        self.bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None

    @property
    def kept(self) -> Sequence[Tensor]:
        return [self.values, self.scales, *([] if self.bias is None else [self.bias])]

    def rows(self, index: Tensor) -> Tensor:
        """index [n] -> [n, in]"""
        return (self.values[index].float() * self.scales[index, None]).to(self.dtype)

    def put(self, part: int, rows: Tensor, start: int = 0) -> None:
        end = start + len(rows)
        assert end <= self.sizes[part]
        quantize = quantize_int8 if self.values.dtype == torch.int8 else quantize_fp8
        values, scales = quantize(rows.to(self.values.device))
        self._part(self.values, part)[start:end].copy_(values)
        self._part(self.scales, part)[start:end].copy_(scales)

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        values, scales = self._part(self.values, part)[start:stop], self._part(self.scales, part)[start:stop]
        return (values.float() * scales[:, None]).to(self.dtype)

    def put_bias(self, part: int, values: Tensor) -> None:
        assert self.bias is not None
        self._part(self.bias, part).copy_(values)

    def get_bias(self, part: int) -> Tensor:
        assert self.bias is not None
        return self._part(self.bias, part).clone()

    def _part(self, whole: Tensor, part: int) -> Tensor:
        return whole.split_with_sizes(self.sizes)[part]


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and float32 scales [out]; a weight is about its float8 times its scale."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / FP8_MAX
    scaled = weight / torch.where(scales == 0, 1.0, scales)[:, None]
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales

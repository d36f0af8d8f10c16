"""Weights in eight and four bits: the plain twins of what `cpp/` packs and `triton/` multiplies.

All are symmetric. Eight bits, integers or floats (e4m3), have one scale for each output; four bits
one for each group of inputs of each output.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64  # inputs that share a scale in four bits
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FLOATS_OF_FP8 = torch.arange(256, dtype=torch.uint8).view(FP8).float()  # by their bits


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] in -127..127 and float32 scales [out]; a weight is its integer
    times its scale."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    integers = _rounded(weight, scales[:, None]).clamp_(-127, 127)
    return integers.to(torch.int8), scales


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and float32 scales [out]; a weight is about its float8
    times its scale."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / FP8_MAX
    scaled = weight / torch.where(scales == 0, 1.0, scales)[:, None]
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def quantize_int4(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] in -8..7 and float32 scales [out, ceil(in / group)].

    The scale of a group is, of a few below and at the largest weight / 7.5, the one with the least
    squared error.
    """
    out_size, in_size = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -in_size % group)).view(
        out_size, -1, group
    )
    largest = padded.abs().amax(dim=2) / 7.5
    best = largest
    least = torch.full_like(largest, torch.inf)
    for part in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75):
        scales = largest * part
        widened_again = _four_bits(padded, scales) * scales[..., None]
        error = (widened_again - padded).square().sum(dim=2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    integers = _four_bits(padded, best).to(torch.int8).view(out_size, -1)
    return integers[:, :in_size].contiguous(), best


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight [out, in] that values [out, in] and scales [out] or [out, groups] stand
    for."""
    if scales.dim() == 1:
        return floats(values) * scales[:, None]
    return values * scales.repeat_interleave(GROUP, dim=1)[:, : values.shape[1]]


def floats(values: Tensor) -> Tensor:
    """As float32. On a CPU torch is six times as fast at looking eight bits up as at converting
    them."""
    if values.dtype != FP8 or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.uint8).flatten().int()
    return FLOATS_OF_FP8.index_select(0, bits).view(values.shape)


def widened(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Rows as `Matrix.put` takes them, in a type that needs no scales."""
    return rows if scales is None else dequantize(rows, scales)


QUANTIZE = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
}
# Integers of four bits take eight in torch.
KEPT_IN = {
    "int8": torch.int8,
    "int4": torch.int8,
    "fp8": FP8,
}


def _four_bits(groups: Tensor, scales: Tensor) -> Tensor:
    return _rounded(groups, scales[..., None]).clamp_(-8, 7)


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    return (x / torch.where(scales == 0, 1.0, scales)).round_()

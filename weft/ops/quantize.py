"""Quantisation of weights and activations to eight and four bits, in torch: the specification of
the kernels in `cpp/`, which pack and multiply, and in `triton/`, which multiply.

On a CPU, weights are codes (`codes.py`) in the formats INT8 and INT4 below; their activations are
rounded to eight bits, in groups of 32 inputs. On a GPU, int8 and fp8 are symmetric, with one scale
per output of a weight and one per row of activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.codes import COARSE, CodeFormat, Codes, Scales

INT8 = CodeFormat(8, 128, offset=128, scale_type=torch.bfloat16)
INT4 = CodeFormat(4, 32, has_mins=True, scale_type=torch.float16)
INT8_BY_OUTPUT = CodeFormat(8, 0, offset=128)  # as checkpoints in int8 are stored
CODE_FORMATS = {"int8": INT8, "int4": INT4}

ROW_GROUP = 32  # inputs of a row of activations that share a scale
LEAST_PEAK = 1e-36  # the inverse of the scale of a smaller peak would be infinite
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FLOATS_OF_FP8 = torch.arange(256, dtype=torch.uint8).view(FP8).float()  # by their bits

# Candidates for the number of steps over the range of a group in four bits. With at most 15, the
# first step is the smallest weight; with more, the outermost weights are clipped on both sides.
STEPS_OF_RANGE = (15, 14, 13, 12, 15.6, 16.3, 17.1, 18)
MOST_STEPS = 15


def round_rows(x: Tensor) -> Tensor:
    """[T, in] -> [T, in], rounded to steps of 1 / 127 of the largest of each 32 inputs, as the
    kernels for codes do."""
    size = x.shape[1]
    groups = _grouped(x, ROW_GROUP)
    peaks = groups.abs().amax(dim=2, keepdim=True)
    # A group with a number that is not finite becomes not finite.
    has_range = ~(peaks <= LEAST_PEAK)
    # A number over a tensor is a reciprocal and a product in torch, which rounds twice.
    inverse = torch.where(has_range, torch.full_like(peaks, 127) / peaks, 0)
    scales = torch.where(has_range, peaks * (1 / 127), 0)
    rounded = (groups * inverse).round() * scales
    return rounded.flatten(1)[:, :size].to(x.dtype)


def quantize_as(format: CodeFormat, weight: Tensor) -> Codes:
    """[out, in] floats -> codes with a small error. `INT8` and `INT4` are the formats that users
    choose; other formats are those of stored codes, for a weight that replaces them later."""
    size = weight.shape[1]
    groups = _grouped(weight, format.group or size)
    mins = None
    if format.has_mins and format.bits == 4:
        scales, mins = _fitted_lines(groups)
    elif format.has_mins:
        low = groups.amin(dim=2)
        scales, mins = (groups.amax(dim=2) - low) / (2**format.bits - 1), low
    else:
        scales = groups.abs().amax(dim=2) / _largest_step(format)
    kept_scales = _kept(format, scales)
    kept_mins = None if mins is None else _kept(format, mins)
    steps = groups
    if kept_mins is not None:
        steps = steps - kept_mins.values(format.group or size, format.unit)[..., None]
    steps = _over(steps, kept_scales.values(format.group or size, format.unit)[..., None])
    codes = _codes_of(format, steps).flatten(1)[:, :size]
    return Codes(format, codes.contiguous(), kept_scales, kept_mins)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 [out, in] in -127..127 and float32 scales [out]; a weight is approximately
    its integer times its scale."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    integers = _over(weight, scales[:, None]).round_().clamp_(-127, 127)
    return integers.to(torch.int8), scales


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and float32 scales [out]; a weight is approximately its
    float8 times its scale."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / FP8_MAX
    scaled = weight / torch.where(scales == 0, 1.0, scales)[:, None]
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """values [out, in] and scales [out] -> the float32 weight [out, in]"""
    return floats(values) * scales[:, None]


def floats(values: Tensor) -> Tensor:
    """The values as float32. On a CPU, a table makes fp8 six times as fast as torch's
    conversion."""
    if values.dtype != FP8 or values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.uint8).flatten().int()
    return FLOATS_OF_FP8.index_select(0, bits).view(values.shape)


def widened(rows: Tensor, scales: Tensor | None) -> Tensor:
    """The rows and scales of `Matrix.put`, as floats without scales."""
    return rows if scales is None else dequantize(rows, scales)


def _grouped(x: Tensor, group: int) -> Tensor:
    """[n, in] -> [n, groups, group] float32, padded with zeros"""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    return padded.view(len(x), -1, group)


def _fitted_lines(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and mins [n, groups] of four bits. For each of STEPS_OF_RANGE, fits a line of weights
    over steps, and keeps the line with the least squared error."""
    group = groups.shape[2]
    low = groups.amin(dim=2)
    high = groups.amax(dim=2)
    middle = (low + high) * 0.5
    values = groups - middle[..., None]
    total = values.sum(dim=2)
    best = torch.full_like(low, -1)
    scales = torch.zeros_like(low)
    mins = middle
    for num_steps in STEPS_OF_RANGE:
        step = (high - low) / num_steps
        first = low - middle if num_steps <= MOST_STEPS else step * (-MOST_STEPS / 2)
        num_above = _over(values - first[..., None], step[..., None])
        q = num_above.round_().clamp_(0, MOST_STEPS)
        total_q = q.sum(dim=2)
        products = (q * values).sum(dim=2)
        spread = group * q.square().sum(dim=2) - total_q * total_q
        slope = _over(group * products - total_q * total, spread)
        base = (total - slope * total_q) / group
        explained = slope * products + base * total
        is_better = explained > best
        scales = torch.where(is_better, slope, scales)
        mins = torch.where(is_better, base + middle, mins)
        best = torch.maximum(best, explained)
    return scales, mins


def _largest_step(format: CodeFormat) -> float:
    if format.table:
        return max(map(abs, format.table))
    if format.bits == 2:
        return format.offset
    return format.offset - 0.5 if format.bits <= 4 else format.offset - 1


def _kept(format: CodeFormat, scales: Tensor) -> Scales:
    """The scales as the format stores them."""
    if not format.is_coarse:
        return Scales(scales.to(format.scale_type))
    by_coarse = _grouped(scales, COARSE // format.group)
    coarse = (by_coarse.abs().amax(dim=2) / (127 * format.unit)).half()
    fine = _over(by_coarse, coarse.float()[..., None] * format.unit).round().clamp(-127, 127)
    return Scales(fine.flatten(1)[:, : scales.shape[1]].to(torch.int8), coarse)


def _codes_of(format: CodeFormat, steps: Tensor) -> Tensor:
    if format.table:
        table = torch.tensor(format.table, dtype=torch.float32, device=steps.device)
        ordered, places = table.sort()
        borders = (ordered[1:] + ordered[:-1]) / 2
        return places[torch.bucketize(steps, borders)].to(torch.uint8)
    lowest = 1 if format.offset == 128 else 0  # -127..127
    codes = (steps.round() + format.offset).clamp(lowest, 2**format.bits - 1)
    return codes.to(torch.uint8)


def _over(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales, and 0 where a scale is 0."""
    return torch.where(scales > 0, x, 0) / torch.where(scales > 0, scales, 1)

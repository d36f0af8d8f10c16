"""Operations between matrix products: norms, the gated activation, and the quantisation of rows to
eight bits with one scale each.

`ops/elementwise.py` is the specification, and `ops/quantize.py` for eight bits. All kernels compute
in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.protocol import Norm
from weft.ops.triton.launches import COLUMNS, NORM_WARPS

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # value of the largest element of a row


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [T, H] -> [T, H]"""
    out = torch.empty_like(x)
    size = x.shape[1]
    rms_norm_kernel[(len(x),)](
        x,
        norm.weight,
        out,
        norm.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=NORM_WARPS,
    )
    return out


def quantize_rows(
    x: Tensor, dtype: torch.dtype, norm: Norm | None = None, least_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """norm(x) in eight bits, int8 or float8_e4m3fn: [T, H] and the scale of each row, float32 [T].

    A value is approximately its eight bits times the scale of its row; the scale is NaN if a value
    of the row is. The result has at least `least_rows` rows; the content of added rows is
    arbitrary.
    """
    num, size = x.shape
    kept = torch.empty(
        max(num, least_rows),
        size,
        dtype=dtype,
        device=x.device,
    )
    scales = torch.empty(len(kept), device=x.device)
    quantize_kernel[(num,)](
        x,
        x if norm is None else norm.weight,
        kept,
        scales,
        0.0 if norm is None else norm.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        NORMED=norm is not None,
        LARGEST=LARGEST[dtype],
        INTEGER=dtype == torch.int8,
        num_warps=NORM_WARPS,
    )
    return kept, scales


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]"""
    num = len(x)
    size = x.shape[1] // 2
    out = torch.empty(num, size, dtype=x.dtype, device=x.device)
    silu_and_mul_kernel[(num, triton.cdiv(size, COLUMNS))](
        x, out, SIZE=size, BLOCK=COLUMNS, num_warps=4
    )
    return out


def scaled(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, add: bool
) -> Tensor:
    """Write (out +) sums * row_scales * scales + bias into `out` [T, N]: the scaling after a
    product of eight bits.

    sums [T or more, N] of any type, row_scales [T or more], scales [N], bias [N].
    """
    num, size = out.shape
    scaled_kernel[(num, triton.cdiv(size, COLUMNS))](
        sums,
        row_scales,
        scales,
        scales if bias is None else bias,
        out,
        SIZE=size,
        BLOCK=COLUMNS,
        BIAS=bias is not None,
        ADD=add,
        num_warps=4,
    )
    return out


@triton.jit
def normed(x, weight_ptr, column, eps, SIZE: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return x * (1 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)) * weight


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(x_ptr + at, mask=column < SIZE, other=0.0).to(tl.float32)
    y = normed(x, weight_ptr, column, eps, SIZE)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=column < SIZE)


@triton.jit
def quantize_kernel(
    x_ptr,
    weight_ptr,
    kept_ptr,
    scales_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if NORMED:
        x = normed(x, weight_ptr, column, eps, SIZE)
    scale = tl.div_rn(tl.max(tl.abs(x), 0), LARGEST)
    y = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    if INTEGER:
        y = rounded(y)
    tl.store(kept_ptr + row * SIZE + column, y.to(kept_ptr.dtype.element_ty), mask=column < SIZE)
    # tl.max ignores NaN, and integers cannot represent it.
    strange = tl.max((x != x).to(tl.int32), 0)
    tl.store(scales_ptr + row, tl.where(strange > 0, float("nan"), scale))


@triton.jit
def rounded(x):
    """x rounded to the nearest integer, halves to even, for |x| up to 2^22: the sum below has no
    bits for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x_ptr + row * (2 * SIZE) + column
    gate = tl.load(at, mask=column < SIZE, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=column < SIZE, other=0.0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=column < SIZE)


@triton.jit
def scaled_kernel(
    sums_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    y = tl.load(sums_ptr + row * SIZE + column, mask=mask, other=0).to(tl.float32)
    y = y * tl.load(row_scales_ptr + row) * tl.load(scales_ptr + column, mask=mask, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + row * SIZE + column
    if ADD:
        y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=mask)

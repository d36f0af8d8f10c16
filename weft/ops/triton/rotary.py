"""The operations on a step's queries, keys and values before attention, in one kernel: the norms of
heads, the rotation, and storing K and V in their slots. `executor/plain/attention.py` is the
specification in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.protocol import Norm
from weft.ops.triton.launches import ROTARY_TOKENS, power_of_two
from weft.ops.triton.paged import Kv

FEW_TOKENS = 64  # up to this number of tokens, one program per token and head


def rotary_store(
    qkv: Tensor,
    kv: Kv,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    num_heads: int,
    q_head_stride: int,
) -> None:
    """qkv [T, heads * q_head_stride + 2 * kv_heads * D]: normalise and rotate queries in place,
    store keys, normalised and rotated, and values in slots [T] (-1: drop).

    cos and sin [positions, D / 2] float32, by position; positions and slots int32.
    """
    num_tokens = len(qkv)
    kv_heads, head_dim = kv.k.shape[1:]
    tokens = 1 if num_tokens <= FEW_TOKENS else ROTARY_TOKENS
    normed = q_norm is not None and k_norm is not None
    assert qkv.stride(1) == 1
    rotary_store_kernel[(triton.cdiv(num_tokens, tokens), num_heads + kv_heads)](
        qkv,
        kv.k,
        kv.v,
        cos,
        sin,
        positions,
        slots,
        q_norm.weight if q_norm else cos,
        k_norm.weight if k_norm else cos,
        q_norm.eps if q_norm else 0.0,
        1 / kv.k_scale,
        1 / kv.v_scale,
        num_tokens,
        qkv.stride(0),
        HEADS=num_heads,
        Q_STRIDE=q_head_stride,
        KV_HEADS=kv_heads,
        D=head_dim,
        HALF_PAD=power_of_two(head_dim) // 2,
        TOKENS=tokens,
        NORMED=normed,
        FP8=kv.k.dtype == torch.float8_e4m3fn,
        num_warps=1 if tokens == 1 else 4,
    )


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def rotary_store_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_factor,
    v_factor,
    num_tokens,
    qkv_stride,
    HEADS: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
    FP8: tl.constexpr,
):
    """A program computes one head of some tokens. The first heads are those of the queries, then
    those of the keys, each with its values."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    half: tl.constexpr = D // 2
    pair = tl.arange(0, HALF_PAD)
    inside = there[:, None] & (pair < half)[None, :]
    row = qkv_ptr + token.to(tl.int64)[:, None] * qkv_stride
    # Queries may be further apart than their size; the values between them do not change.
    begin = head * Q_STRIDE
    if head >= HEADS:
        begin = HEADS * Q_STRIDE + (head - HEADS) * D
    at = row + begin + pair[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        weight_ptr = k_norm_ptr
        if head < HEADS:
            weight_ptr = q_norm_ptr
        factor = 1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        a = (
            a
            * factor[:, None]
            * tl.load(weight_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        )
        b = (
            b
            * factor[:, None]
            * tl.load(weight_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        )
    angle = (
        tl.load(positions_ptr + token, mask=there, other=0).to(tl.int64)[:, None] * half
        + pair[None, :]
    )
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    first = a * cos - b * sin
    second = b * cos + a * sin
    if head < HEADS:
        tl.store(at, first.to(qkv_ptr.dtype.element_ty), mask=inside)
        tl.store(at + half, second.to(qkv_ptr.dtype.element_ty), mask=inside)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots_ptr + token, mask=there, other=-1).to(tl.int64)
        kept = inside & (slot >= 0)[:, None]
        to = (slot * KV_HEADS + kv_head)[:, None] * D + pair[None, :]
        store(k_ptr + to, first * k_factor, kept, FP8)
        store(k_ptr + to + half, second * k_factor, kept, FP8)
        value_at = at + KV_HEADS * D
        store(
            v_ptr + to, tl.load(value_at, mask=kept, other=0.0).to(tl.float32) * v_factor, kept, FP8
        )
        store(
            v_ptr + to + half,
            tl.load(value_at + half, mask=kept, other=0.0).to(tl.float32) * v_factor,
            kept,
            FP8,
        )


@triton.jit
def store(at, x, mask, FP8: tl.constexpr):
    if FP8:
        # The largest e4m3. Larger values would become NaN.
        bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
        x = tl.where(x != x, x, bounded)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)

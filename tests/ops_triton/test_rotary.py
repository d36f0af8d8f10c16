"""Norms of heads, rotation and the storing of K and V, against the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops_triton.cached import sparse_bytes
from tests.ops_triton.eight_bits import carried
from weft.ops.elementwise import apply_rotary, rms_norm, rotary_angles, rotary_tables
from weft.ops.protocol import Norm
from weft.ops.triton.paged import Kv
from weft.ops.triton.rotary import FEW_TOKENS, rotary_store

HEADS = 4
KV_HEADS = 2
CONTEXT = 90
SLOTS = 200


def run(
    num: int,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    normed: bool = True,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q, k and v in the order of tokens that have a slot: as the kernel leaves them, and as they
    should be."""
    random = torch.Generator().manual_seed(num)
    qkv = torch.randn(num, (HEADS + 2 * KV_HEADS) * head_dim, generator=random).mul_(3).to(dtype)
    norms = [
        Norm(torch.randn(head_dim, generator=random).to(dtype), 1e-5) if normed else None
        for _ in "qk"
    ]
    positions = torch.randint(CONTEXT, (num,), generator=random)
    slots = torch.randperm(SLOTS, generator=random)[:num].int()
    slots[num // 2] = -1
    inv_freq = 1.0 / 100 ** (torch.arange(head_dim // 2) / head_dim)
    q, k, v = qkv.view(num, -1, head_dim).double().split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
    if norms[0] and norms[1]:
        q, k = (
            rms_norm(x, norm.weight.double(), norm.eps)
            for x, norm in zip((q, k), norms, strict=True)
            if norm
        )
    tables = rotary_tables(*rotary_angles(positions, inv_freq, 1.5), torch.float64)
    kv = Kv._make((*torch.zeros(2, SLOTS, KV_HEADS, head_dim).to(kv_dtype), *scales))
    angles = rotary_angles(torch.arange(CONTEXT), inv_freq, 1.5)
    rotary_store(qkv, kv, *angles, positions.int(), slots, norms[0], norms[1], HEADS, head_dim)
    there = slots >= 0
    assert (kv.k.float() != 0).any(-1).any(-1).sum() == there.sum(), "what has no slot is dropped"
    got = (
        qkv.view(num, -1, head_dim)[:, :HEADS][there],
        kv.k[slots[there].long()],
        kv.v[slots[there].long()],
    )
    want = (apply_rotary(q, *tables)[there], apply_rotary(k, *tables)[there], v[there])
    return (got[0].double(), got[1].double() * scales[0], got[2].double() * scales[1]), want


@pytest.mark.parametrize("num", [1, 7, FEW_TOKENS + 5])
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normed_and_rotated_and_values_kept(num: int, normed: bool) -> None:
    torch.testing.assert_close(*run(num, normed=normed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 128])
def test_heads_have_any_size(head_dim: int) -> None:
    torch.testing.assert_close(*run(5, head_dim), rtol=1e-5, atol=1e-5)


def test_sixteen_bits_are_rounded_once() -> None:
    torch.testing.assert_close(
        *run(9, dtype=torch.float16, kv_dtype=torch.float16), rtol=1e-3, atol=1e-3
    )


def test_eight_bits_are_kept_in_units_of_the_scale() -> None:
    (_, k, v), (_, k_twin, v_twin) = run(9, kv_dtype=torch.float8_e4m3fn, scales=(0.25, 4.0))
    for got, want, scale in ((k, k_twin, 0.25), (v, v_twin, 4.0)):
        want = (want / scale).to(torch.float8_e4m3fn).double()
        torch.testing.assert_close(carried(got / scale, want), want, rtol=0, atol=0)


def test_eight_bits_that_do_not_suffice_hold_the_largest_value() -> None:
    (_, _, v), (_, _, v_twin) = run(9, kv_dtype=torch.float8_e4m3fn, scales=(1.0, 1e-3))
    large = v_twin.abs() > 0.448
    assert large.any()
    torch.testing.assert_close(v[large], 0.448 * v_twin[large].sign(), rtol=1e-6, atol=0)


def test_slots_may_lie_behind_more_numbers_than_32_bits_count() -> None:
    """Where only bytes that are used take memory: an index that wrapped would write to the
    beginning."""
    head_dim = 16
    few = 8
    ahead = (1 << 32) // (KV_HEADS * head_dim)
    large = (
        sparse_bytes((ahead + few) * KV_HEADS * head_dim)
        .view(torch.float8_e4m3fn)
        .view(-1, KV_HEADS, head_dim)
    )
    qkv = torch.ones(2, (HEADS + 2 * KV_HEADS) * head_dim)
    angles = torch.ones(4, head_dim // 2)
    slots = torch.tensor([ahead + 3, ahead + 5], dtype=torch.int32)
    rotary_store(
        qkv,
        Kv(large, large),
        angles,
        angles,
        torch.zeros(2, dtype=torch.int32),
        slots,
        None,
        None,
        HEADS,
        head_dim,
    )
    written = (large.view(torch.uint8)[ahead:] != 0).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [3, 5]
    assert not large.view(torch.uint8)[: 2 * few].any()

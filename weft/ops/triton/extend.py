"""Attention of requests with several tokens: prompts, chunks of them, drafts to verify.

The queries of a request that share a KV head are rows, token by token, divided into tiles of
`Launch.rows` rows; a program computes one tile over the cached tokens that it sees. The host makes
the list of tiles, padded with -1, so the grid does not depend on the step. Sources:
arXiv:2205.14135, arXiv:2307.08691.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.launches import Launch, extend_launch, power_of_two
from weft.ops.triton.paged import LOG2_E, UNIT, Kv, PagedStep, Terms, gated, take_in

# Pointers into one packed copy. Triton must not compile a kernel again for each alignment of them.
UNALIGNED = [
    "rows_ptr",
    "kv_lens_ptr",
    "q_indptr_ptr",
    "tile_req_ptr",
    "tile_start_ptr",
]


def extend(
    q: Tensor,
    kv: Kv,
    step: PagedStep,
    out: Tensor,
    terms: Terms,
    launch: Launch | None = None,
) -> None:
    """Attention of the tokens in the step's tiles of `launch.rows` queries: q [T, heads, D] -> out,
    contiguous.

    `ops/attention.py` specifies which tokens a token sees. K and V of this step's tokens are in the
    cache already.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = kv.k.shape[1]
    launch = launch or extend_launch(head_dim, heads // kv_heads)
    assert q.stride(2) == 1
    assert terms.gate is None or terms.gate.stride() == q.stride()
    assert out.is_contiguous()
    extend_kernel[(len(step.tile_req), kv_heads)](
        q,
        kv.k,
        kv.v,
        out,
        q if terms.sinks is None else terms.sinks,
        q if terms.gate is None else terms.gate,
        step.rows,
        step.kv_lens,
        step.q_indptr,
        step.tile_req,
        step.tile_start,
        step.table,
        terms.scale * kv.k_scale * LOG2_E,
        kv.v_scale,
        q.stride(0),
        step.table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PAD=power_of_two(head_dim),
        HEAD_STRIDE=q.stride(1),
        ROWS=launch.rows,
        KEYS=launch.keys,
        WINDOW=terms.window,
        CHUNKED=terms.chunked,
        CAP=terms.cap * LOG2_E,
        SINKS=terms.sinks is not None,
        GATED=terms.gate is not None,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sinks_ptr,
    gate_ptr,
    rows_ptr,
    kv_lens_ptr,
    q_indptr_ptr,
    tile_req_ptr,
    tile_start_ptr,
    table_ptr,
    scale,
    v_scale,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    GATED: tl.constexpr,
):
    request = tl.load(tile_req_ptr + tl.program_id(0))
    kv_head = tl.program_id(1)
    if request >= 0:
        start = tl.load(tile_start_ptr + tl.program_id(0))
        first_token = tl.load(q_indptr_ptr + request)
        num_tokens = tl.load(q_indptr_ptr + request + 1) - first_token
        cached = tl.load(kv_lens_ptr + request) - num_tokens
        slots_of = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride

        row = start + tl.arange(0, ROWS)
        token = row // GROUP  # index within the request
        head = kv_head * GROUP + row % GROUP
        dims = tl.arange(0, D_PAD)
        inside = (token < num_tokens)[:, None] & (dims < D)[None, :]
        at = (first_token + token).to(tl.int64)
        q_at = at[:, None] * q_stride + head[:, None] * HEAD_STRIDE + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=inside, other=0.0)

        #   cached tokens:  0 ......... all_seen ......... end
        #                   every query sees |  some see them
        limit = cached + token + 1
        end = cached + tl.minimum((start + ROWS - 1) // GROUP, num_tokens - 1) + 1
        first_seen = 0
        if CHUNKED:
            first_seen = (cached + start // GROUP) // WINDOW * WINDOW
        elif WINDOW > 0:
            first_seen = tl.maximum(cached + start // GROUP + 1 - WINDOW, 0)
        if WINDOW > 0:
            begin = first_seen // KEYS * KEYS
            all_seen = begin
        else:
            begin = 0
            all_seen = (cached + start // GROUP + 1) // KEYS * KEYS

        peak = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        if SINKS:
            peak = tl.load(sinks_ptr + head) * UNIT
            mass += 1.0
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        k_head = k_ptr + kv_head * D
        v_head = v_ptr + kv_head * D
        STRIDE: tl.constexpr = KV_HEADS * D
        if WINDOW == 0:
            peak, mass, acc = take_in(
                q, peak, mass, acc, k_head, v_head, slots_of, scale, begin, all_seen,
                begin, limit,
                STRIDE, D, D_PAD, KEYS, WINDOW, CHUNKED, CAP, False,
            )  # fmt: skip
        peak, mass, acc = take_in(
            q, peak, mass, acc, k_head, v_head, slots_of, scale, all_seen, end,
            first_seen, limit,
            STRIDE, D, D_PAD, KEYS, WINDOW, CHUNKED, CAP, True,
        )  # fmt: skip
        acc = acc * (v_scale / tl.where(mass == 0.0, 1.0, mass))[:, None]
        if GATED:
            acc = gated(acc, tl.load(gate_ptr + q_at, mask=inside, other=0.0))
        out_at = out_ptr + (at[:, None] * (KV_HEADS * GROUP) + head[:, None]) * D + dims[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)

"""Attention of requests with one token. Its speed is limited by reading K and V from memory.

The queries of one KV head are one tile. The cached tokens of a request are divided into splits, one
program each, so that few requests keep a whole GPU busy; a second kernel combines the splits. The
size of the step determines their number. A program whose split has no tokens ends at once. Source:
Flash-Decoding, arXiv:2311.01282.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.launches import Launch, decode_launch, power_of_two
from weft.ops.triton.paged import LOG2_E, UNIT, Kv, PagedStep, Terms, gated, take_in

# Pointers into one packed copy. Triton must not compile a kernel again for each alignment of them.
UNALIGNED = [
    "rows_ptr",
    "kv_lens_ptr",
    "q_indptr_ptr",
    "decode_req_ptr",
]


def decode(
    q: Tensor,
    kv: Kv,
    step: PagedStep,
    out: Tensor,
    terms: Terms,
    launch: Launch | None = None,
) -> None:
    """Attention of the requests `step.decode_req`, which have one token each: q [T, heads, D] ->
    out, contiguous.

    `ops/attention.py` specifies which tokens a token sees. K and V of this step's tokens are in the
    cache already.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = kv.k.shape[1]
    launch = launch or decode_launch(head_dim, heads // kv_heads)
    num = len(step.decode_req)
    splits = step.num_splits
    assert q.stride(2) == 1
    assert terms.gate is None or terms.gate.stride() == q.stride()
    gate = q if terms.gate is None else terms.gate
    assert out.is_contiguous()
    parts = out
    logs = out  # not written: a single split needs no combination
    if splits > 1:
        parts = torch.empty(num, heads, splits, head_dim, device=q.device)
        logs = torch.empty(num, heads, splits, device=q.device)
    decode_kernel[(num, kv_heads, splits)](
        q,
        kv.k,
        kv.v,
        parts,
        logs,
        q if terms.sinks is None else terms.sinks,
        gate,
        step.rows,
        step.kv_lens,
        step.q_indptr,
        step.decode_req,
        step.table,
        terms.scale * kv.k_scale * LOG2_E,
        kv.v_scale,
        q.stride(0),
        step.table.stride(0),
        splits,
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
        SPLIT=splits > 1,
        SINKS=terms.sinks is not None,
        GATED=terms.gate is not None,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if splits > 1:
        combine_kernel[(num, heads)](
            parts,
            logs,
            out,
            gate,
            step.q_indptr,
            step.decode_req,
            q.stride(0),
            HEADS=heads,
            D=head_dim,
            D_PAD=power_of_two(head_dim),
            HEAD_STRIDE=q.stride(1),
            GATED=terms.gate is not None,
            SPLITS=splits,
            SPLITS_PAD=triton.next_power_of_2(splits),  # the splits of a `Size` are powers of two
            num_warps=4,
        )


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,  # [decodes, heads, splits, D]; with one split [T, heads, D]
    logs_ptr,  # [decodes, heads, splits]
    sinks_ptr,  # [heads]
    gate_ptr,  # as q
    rows_ptr,
    kv_lens_ptr,
    q_indptr_ptr,
    decode_req_ptr,
    table_ptr,
    scale,
    v_scale,
    q_stride,
    table_stride,
    splits,
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
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    GATED: tl.constexpr,
):
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(decode_req_ptr + index)
    if request >= 0:
        token = tl.load(q_indptr_ptr + request).to(tl.int64)
        kv_len = tl.load(kv_lens_ptr + request)
        slots_of = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
        seen_from = 0
        if CHUNKED:
            seen_from = (kv_len - 1) // WINDOW * WINDOW
        elif WINDOW > 0:
            seen_from = tl.maximum(kv_len - WINDOW, 0)
        part = tl.cdiv(tl.cdiv(kv_len - seen_from, splits), KEYS) * KEYS
        begin = seen_from + split * part
        end = tl.minimum(begin + part, kv_len)

        row = tl.arange(0, ROWS)
        head = kv_head * GROUP + row
        dims = tl.arange(0, D_PAD)
        inside = (row < GROUP)[:, None] & (dims < D)[None, :]
        offset = ((index if SPLIT else token) * (KV_HEADS * GROUP) + head) * splits + split
        at = parts_ptr + offset[:, None] * D + dims[None, :]

        if begin < end:
            q_at = token * q_stride + head[:, None] * HEAD_STRIDE + dims[None, :]
            q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            if SINKS:
                # Only the first split, which always has tokens, adds the sink.
                sink = tl.load(sinks_ptr + head, mask=row < GROUP, other=0.0)
                peak = tl.where(split == 0, sink * UNIT, peak)
                mass = tl.where(split == 0, 1.0, mass)
            acc = tl.zeros([ROWS, D_PAD], tl.float32)
            limit = tl.full([ROWS], 0, tl.int32) + end
            peak, mass, acc = take_in(
                q, peak, mass, acc, k_ptr + kv_head * D, v_ptr + kv_head * D, slots_of, scale,
                begin, end, begin, limit,
                KV_HEADS * D, D, D_PAD, KEYS, 0, False, CAP, True,
            )  # fmt: skip
            acc = acc * (v_scale / mass)[:, None]
            if GATED and not SPLIT:
                acc = gated(acc, tl.load(gate_ptr + q_at, mask=inside, other=0.0))
            tl.store(at, acc.to(parts_ptr.dtype.element_ty), mask=inside)
            if SPLIT:
                tl.store(logs_ptr + offset, peak + tl.log2(mass), mask=row < GROUP)
        elif SPLIT:
            tl.store(
                logs_ptr + offset, tl.full([ROWS], -float("inf"), tl.float32), mask=row < GROUP
            )


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def combine_kernel(
    parts_ptr,
    logs_ptr,
    out_ptr,
    gate_ptr,
    q_indptr_ptr,
    decode_req_ptr,
    q_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    index = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(decode_req_ptr + index)
    if request >= 0:
        token = tl.load(q_indptr_ptr + request).to(tl.int64)
        split = tl.arange(0, SPLITS_PAD)
        dims = tl.arange(0, D_PAD)
        offset = (index * HEADS + head) * SPLITS + split
        log = tl.load(
            logs_ptr + offset,
            mask=split < SPLITS,
            other=-float("inf"),
        )
        weight = tl.exp2(log - tl.max(log, 0))
        weight = weight / tl.sum(weight, 0)
        # A split without tokens has written no values.
        there = (log > -float("inf"))[:, None] & (dims < D)[None, :]
        part = tl.load(
            parts_ptr + offset[:, None] * D + dims[None, :],
            mask=there,
            other=0.0,
        )
        value = tl.sum(part * weight[:, None], 0)
        if GATED:
            gate_at = gate_ptr + token * q_stride + head * HEAD_STRIDE + dims
            value = gated(value, tl.load(gate_at, mask=dims < D, other=0.0))
        tl.store(
            out_ptr + (token * HEADS + head) * D + dims,
            value.to(out_ptr.dtype.element_ty),
            mask=dims < D,
        )

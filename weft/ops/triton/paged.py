"""The shared code of the two attention kernels: the arrays that they read, and the update of a tile
of queries with cached tokens.

A tile is a number of queries of one request that share a KV head. Cached token n = 0, 1, ... is in
slot table[row, n]. Slots need not be consecutive: pages of one token cost no more than larger ones,
because the K of one token and head is contiguous anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
UNIT = tl.constexpr(LOG2_E)  # scores within kernels are in units of log 2


class Kv(NamedTuple):
    """The cache of one layer. It stores K / k_scale and V / v_scale."""

    k: Tensor  # [slots, kv_heads, D], contiguous
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class Terms(NamedTuple):
    """The parameters of a layer's attention, as specified in `ops/attention.py`."""

    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None  # [heads] float32
    gate: Tensor | None = None  # [T, heads, D], strides as the queries: out is times its sigmoid
    chunked: bool = False


class PagedStep(NamedTuple):
    """The arrays of a step that the kernels read, on the device. Every tensor is int32 and
    contiguous.

    Entries beyond the step are padding: kv_lens 0, requests -1 in `decode_req` and `tile_req`,
    slots -1.
    """

    rows: Tensor  # [R] row of each request in the table
    kv_lens: Tensor  # [R] tokens of each request in the cache, this step's included
    q_indptr: Tensor  # [R + 1] request r has the tokens q_indptr[r] : q_indptr[r + 1]
    decode_req: Tensor  # [D] requests with one token
    tile_req: Tensor  # [N] request of each tile
    # [N] index of the tile's first query in its request: token * group + head in the group.
    tile_start: Tensor
    positions: Tensor  # [T]
    out_slots: Tensor  # [T] slots for K and V of this step's tokens
    table: Tensor  # [max_rows, context_length] slot of each token of each row, this step's included
    num_splits: int  # splits of the cached tokens of each request in `decode_req`


@triton.jit
def take_in(
    q,  # [ROWS, D]
    peak,  # [ROWS] largest score so far, in units of log 2
    mass,  # [ROWS] sum of 2^(score - peak)
    acc,  # [ROWS, D] the same sum, of values
    k_head,  # K of this head in slot 0
    v_head,
    slots_of,  # the request's row of the table
    scale,
    begin,
    end,
    first_seen,  # tokens before this one are not read
    limit,  # [ROWS] a query sees only tokens below its limit
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the cached tokens begin : end to peak, mass and acc. Unless MASKED, every query sees all
    of them, and they are full blocks.

    Source: online softmax, arXiv:2205.14135.
    """
    dims = tl.arange(0, D_PAD)
    for first in range(begin, end, KEYS):
        n = first + tl.arange(0, KEYS)
        there = (n >= first_seen) & (n < end)
        if MASKED:
            slots = tl.load(slots_of + n, mask=there, other=0).to(tl.int64)
        else:
            slots = tl.load(slots_of + n).to(tl.int64)
        k_at = k_head + slots[None, :] * STRIDE + dims[:, None]
        v_at = v_head + slots[:, None] * STRIDE + dims[None, :]
        if D == D_PAD:
            if MASKED:
                k = tl.load(
                    k_at,
                    mask=there[None, :],
                    other=0.0,
                )
                v = tl.load(
                    v_at,
                    mask=there[:, None],
                    other=0.0,
                )
            else:
                k = tl.load(k_at)
                v = tl.load(v_at)
        else:
            k = tl.load(
                k_at,
                mask=there[None, :] & (dims < D)[:, None],
                other=0.0,
            )
            v = tl.load(
                v_at,
                mask=there[:, None] & (dims < D)[None, :],
                other=0.0,
            )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAP > 0:
            # cap tanh(score / cap), computed from e^2x, because Triton has no tanh.
            scores = CAP * (1 - 2 / (1 + tl.exp2(scores * (2 * UNIT / CAP))))
        if MASKED:
            seen = (n[None, :] < limit[:, None]) & there[None, :]
            if CHUNKED:
                seen = seen & (n[None, :] >= (limit[:, None] - 1) // WINDOW * WINDOW)
            elif WINDOW > 0:
                seen = seen & (n[None, :] >= limit[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a query that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(
            weights.to(q.dtype), v.to(q.dtype), input_precision="ieee"
        )
        peak = higher
    return peak, mass, acc


@triton.jit
def gated(result, gate):
    """result sigmoid(gate)"""
    return result / (1 + tl.exp2(-gate.to(tl.float32) * UNIT))

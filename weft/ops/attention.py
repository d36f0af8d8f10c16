"""Attention over cached tokens in plain torch: the specification of the kernels, in the floats that
it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    lens: Tensor,
    window: int,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T) v for each token of a step, over what it sees of its request.

    q [T, heads, D]; k and v [slots, kv_heads, D], heads a multiple of kv_heads; table [.., context]
    has the slot of each token of a request in the line that `rows` [R] names. Request r has
    starts[r] tokens in the cache and lens[r] in this step, which stand after those of the requests
    before it. A token sees itself and the window - 1 tokens before it (window 0: all). With a
    cap, scores become cap tanh(score / cap). Returns [T, heads, D]. Sources: arXiv:1706.03762;
    grouped queries: arXiv:2305.13245.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    end = 0
    for row, start, num in zip(rows.tolist(), starts.tolist(), lens.tolist(), strict=True):
        begin = end
        end = end + num
        slots = table[row, : start + num].long()
        keys = k[slots].repeat_interleave(group, dim=1)  # [L, heads, D]
        values = v[slots].repeat_interleave(group, dim=1)
        queries = torch.arange(start, start + num)[:, None]
        distance = queries - torch.arange(start + num)  # [num, L]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores = torch.einsum("thd,lhd->htl", q[begin:end], keys) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("htl,lhd->thd", weights, values)
    return out

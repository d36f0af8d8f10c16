"""Attention over cached tokens in plain torch: the specification of the kernels. It computes in the
type of its arguments."""

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
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """softmax(scale * q k^T) v for each token of a step, over the tokens of its request that it
    sees.

    q [T, heads, D]; k and v [slots, kv_heads, D], heads a multiple of kv_heads; table
    [.., context] and rows [R]: table[rows[r], i] is the slot of token i of request r. Request r has
    starts[r] tokens in the cache and lens[r] in this step; in q, requests follow each other. A
    token sees itself and the window - 1 tokens before it (window 0: all), or those from the last
    multiple of the window on (chunked); slots that no token sees are not read. With a cap, scores
    become cap tanh(score / cap). With sinks [heads], the softmax of a head has one more score, the
    sink, unscaled, which has no value. Returns [T, heads, D].
    Sources: arXiv:1706.03762; grouped queries: arXiv:2305.13245; sinks: arXiv:2309.17453, learnt
    ones: arXiv:2508.10925.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    end = 0
    for row, start, num in zip(rows.tolist(), starts.tolist(), lens.tolist(), strict=True):
        begin = end
        end = end + num
        queries = torch.arange(start, start + num)
        firsts = _first_seen(queries, window, chunked)
        first = int(firsts[0]) if num else 0
        slots = table[row, first : start + num].long()
        keys = k[slots].repeat_interleave(group, dim=1)  # [L, heads, D]
        values = v[slots].repeat_interleave(group, dim=1)
        positions = torch.arange(first, start + num)  # [L]
        hidden = (positions > queries[:, None]) | (positions < firsts[:, None])
        scores = torch.einsum("thd,lhd->htl", q[begin:end], keys) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = softmax_with_sinks(scores, None if sinks is None else sinks[:, None, None])
        out[begin:end] = torch.einsum("htl,lhd->thd", weights, values)
    return out


def _first_seen(queries: Tensor, window: int, chunked: bool) -> Tensor:
    """The position of the first token that each query sees: [num]"""
    if not window:
        return torch.zeros_like(queries)
    if chunked:
        return queries - queries % window
    return (queries + 1 - window).clamp(min=0)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax over the last dimension: [.., L] -> [.., L]. `sinks` [.., 1] are part of its sum, but
    their weights are not returned."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]

"""The choice of keys by an indexer, in plain torch: the specification of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """The sum over heads of weight * relu(q k), in float32.

    q [n, heads, D]; k [L, D]; weights [n, heads]. Returns [n, L]. Constant factors of products and
    of weights, which models have, change no choice. Source: arXiv:2512.02556, 2.1.
    """
    products = torch.einsum("nhd,ld->nhl", q.float(), k.float())
    return torch.einsum("nhl,nh->nl", torch.relu(products), weights.float())


def chosen_keys(scores: Tensor, num_seen: Tensor, num_chosen: int) -> Tensor:
    """Which keys each query attends to: the `num_chosen` with the highest scores of the first
    `num_seen` [n]; of equal ones the first, and scores that are no numbers come last. scores
    [n, L]. Returns booleans [n, L]."""
    is_seen = torch.arange(scores.shape[1], device=scores.device) < num_seen[:, None]
    scores = scores.masked_fill(~is_seen | scores.isnan(), -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    return torch.zeros_like(is_seen).scatter_(1, best, True) & is_seen

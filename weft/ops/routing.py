"""How a router chooses experts: the specification, in torch.

A router computes a logit for each token and expert. Scores are computed from the logits. The
experts with the best scores are chosen, and their weights are computed from the scores.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SUM = 1e-20  # added to the sum by which weights are divided


class Scores(Enum):
    SOFTMAX = "softmax"  # over all logits
    CHOSEN = "chosen"  # the logits; weights are the softmax over the chosen ones
    SIGMOID = "sigmoid"  # of each logit


class Choice(NamedTuple):
    """The rule by which experts are chosen and weighted."""

    num_experts: int
    num_chosen: int
    scores: Scores = Scores.SOFTMAX
    is_normed: bool = False  # weights are divided by their sum
    scale: float = 1.0  # of weights
    # Consecutive experts form groups. The score of a group is the sum of its two best scores, and
    # only experts of the best groups can be chosen.
    num_groups: int = 1
    num_groups_chosen: int = 1
    counts_one: bool = False  # the score of a group is its best score


class Routed(NamedTuple):
    """The experts of each token, the best first, and their weights."""

    experts: Tensor  # [T, k] int32
    weights: Tensor  # [T, k] float32


def choose(
    logits: Tensor,
    choice: Choice,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> Routed:
    """logits [T, experts] float32 -> the chosen experts; of equal scores the first expert. `bias`
    [experts] float32 is added to the scores for the choice only, not for the weights;
    `expert_scale` [experts] float32 multiplies the weights.

    Source: Mixtral, arXiv:2401.04088; bias and groups: DeepSeek-V3, arXiv:2412.19437.
    """
    match choice.scores:
        case Scores.SOFTMAX:
            scores = logits.softmax(-1)
        case Scores.SIGMOID:
            scores = logits.sigmoid()
        case Scores.CHOSEN:
            scores = logits
    ranks = scores if bias is None else scores + bias
    if choice.num_groups > 1:
        ranks = _in_best_groups(ranks, choice)
    experts = _best(ranks, choice.num_chosen)
    weights = scores.gather(-1, experts)
    if choice.scores is Scores.CHOSEN:
        weights = weights.softmax(-1)
    if choice.is_normed:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    weights = weights * choice.scale
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    return Routed(experts.int(), weights)


def _in_best_groups(ranks: Tensor, choice: Choice) -> Tensor:
    """`ranks`, with -inf for the experts of groups that are not chosen."""
    grouped = ranks.view(len(ranks), choice.num_groups, -1)
    num_counted = 1 if choice.counts_one else 2
    counts = grouped.topk(num_counted, dim=-1).values.sum(-1)
    best = _best(counts, choice.num_groups_chosen)
    is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranks.device)
    is_out.scatter_(1, best, False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def _best(values: Tensor, num: int) -> Tensor:
    """Indices of the largest values, in descending order, equal values by index. torch.topk
    promises no order of equal values."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :num]

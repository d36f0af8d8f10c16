"""Attention within whole prompts, in plain torch: for encoders, whose tokens see each other in both directions.

Nothing is kept from one step to the next. Prompts of similar length share a call, the shorter ones padded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig

PADDING = (
    0.75  # prompts share a call if the shortest has at least this part of the longest's tokens
)
GROUP_TOKENS = 16_384  # of one call, padding included


class Group(NamedTuple):
    """Prompts of similar length."""

    places: Tensor  # [G, L] where their tokens stand in the step; padding repeats the first
    inside: Tensor | None  # [G, L] false where padding; None: nothing is padded


class Whole:
    """`prepare` is called once a step, for all layers."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_heads = config.num_heads
        self._groups: list[Group] = []

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt, which stand one behind the other."""
        order = np.argsort(lens, kind="stable")
        starts = np.cumsum(lens) - lens
        self._groups = []
        begin = 0
        while begin < len(order):
            shortest = int(lens[order[begin]])
            similar = int(np.searchsorted(lens[order], shortest / PADDING, side="right"))
            end = min(similar, begin + max(1, int(GROUP_TOKENS * PADDING) // shortest))
            self._groups.append(_group(starts[order[begin:end]], lens[order[begin:end]], device))
            begin = end

    def forward(self, qkv: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), 3, self._num_heads, -1)
        out = torch.empty_like(heads[:, 0], memory_format=torch.contiguous_format)
        for places, inside in self._groups:
            q, k, v = heads[places].permute(2, 0, 3, 1, 4)  # each [G, heads, L, D]
            mask = None if inside is None else inside[:, None, None]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
            if inside is None:
                out[places] = attended
            else:
                out[places[inside]] = attended[inside]
        return out.flatten(1)


def _group(starts: IntArray, lens: IntArray, device: torch.device) -> Group:
    """Rising `lens`."""
    columns = np.arange(lens[-1])
    inside = columns < lens[:, None]
    places = np.where(inside, starts[:, None] + columns, starts[:, None])
    padded = None if inside.all() else torch.from_numpy(inside).to(device)
    return Group(torch.from_numpy(places.astype(np.int64)).to(device), padded)

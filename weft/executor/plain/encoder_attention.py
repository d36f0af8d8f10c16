"""Attention within whole prompts, in plain torch, for encoders, whose tokens see each other in both
directions.

Nothing is kept between steps. Prompts of similar length share a call; shorter ones are padded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray, consecutive
from weft.models.layers.encoder import PLAIN_HEADS, EncoderHeads

# Prompts share a call if the shortest has at least this fraction of the longest's tokens.
PADDING = 0.75
GROUP_TOKENS = 16_384  # of one call, padding included


class PromptGroup(NamedTuple):
    """Prompts of similar length."""

    places: Tensor  # [G, L] indices of their tokens in the step; padding repeats the first token
    inside: Tensor | None  # [G, L] false for padding; None: nothing is padded


class TorchBidirectional:
    """The `EncoderAttention` in torch, on any device."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self._groups: list[PromptGroup] = []
        self._positions = torch.empty(0, dtype=torch.int64)  # [T] of each token in its prompt

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt; the prompts are concatenated."""
        order = np.argsort(lens, kind="stable")
        starts = (np.cumsum(lens) - lens)[order]
        rising = lens[order]
        self._groups = []
        positions = consecutive(np.zeros(len(lens), np.int64), lens)
        self._positions = torch.from_numpy(positions).to(device)
        begin = 0
        while begin < len(rising):
            shortest = int(rising[begin])
            similar = int(np.searchsorted(rising, shortest / PADDING, side="right"))
            fitting = begin + max(1, int(GROUP_TOKENS * PADDING) // shortest)
            end = min(similar, fitting)
            self._groups.append(_group(starts[begin:end], rising[begin:end], device))
            begin = end

    def forward(self, qkv: Tensor, heads: EncoderHeads = PLAIN_HEADS) -> Tensor:
        parts = qkv.view(
            len(qkv),
            3,
            self._num_heads,
            -1,
        )
        if heads.rope is not None:
            q, k, v = parts.unbind(1)
            tables = heads.rope.tables(self._positions, qkv.dtype)
            q, k = heads.rope.rotate(q, k, tables)
            parts = torch.stack((q, k, v), 1)
        out = torch.empty_like(parts[:, 0], memory_format=torch.contiguous_format)
        for places, inside in self._groups:
            # Each [G, heads, L, D].
            q, k, v = parts[places].permute(
                2,
                0,
                3,
                1,
                4,
            )
            scale = heads.score_scale(q.shape[-1])
            mask = _mask(q, k, inside, heads, scale)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale
            ).transpose(1, 2)
            # Padding has the index of the first token, so writing it would overwrite that token's
            # output.
            if inside is None:
                out[places] = attended
            else:
                out[places[inside]] = attended[inside]
        return out.flatten(1)


def _mask(
    q: Tensor,
    k: Tensor,
    inside: Tensor | None,
    heads: EncoderHeads,
    scale: float,
) -> Tensor | None:
    """What scores of q and k [G, heads, L, D] get, or which of them count; None: all, as they
    are."""
    seen = None if inside is None else inside[:, None, None]
    if not heads.window and heads.biases is None and heads.distances is None:
        return seen
    places = torch.arange(q.shape[2], device=q.device)
    distances = places - places[:, None]
    if heads.window:
        near = distances.abs() < heads.window
        seen = near if seen is None else seen & near
    if heads.biases is None and heads.distances is None:
        return seen
    added = torch.zeros((), dtype=q.dtype, device=q.device)
    if heads.biases is not None:
        added = added + heads.biases.of(distances).to(q.dtype)
    if heads.distances is not None:
        added = added + scale * heads.distances.scores(q, k)
    return added if seen is None else added.masked_fill(~seen, -torch.inf)


def _group(
    starts: IntArray,
    lens: IntArray,
    device: torch.device,
) -> PromptGroup:
    """The group of prompts with these `starts` and ascending `lens`."""
    columns = np.arange(lens[-1])
    inside = columns < lens[:, None]
    first = starts[:, None]
    places = np.where(inside, first + columns, first).astype(np.int64)
    padded = None
    if not inside.all():
        padded = torch.from_numpy(inside).to(device)
    return PromptGroup(torch.from_numpy(places).to(device), padded)

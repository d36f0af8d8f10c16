"""What comes before attention on a GPU, whoever computes it: norms of heads, rotation, K and V to their slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.triton.paged import Kv
from weft.ops.triton.rotary import rotary_store


class Store:
    """`kv` [layers]; positions are below `context_length`."""

    def __init__(self, config: ModelConfig, kv: Sequence[Kv], context_length: int) -> None:
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self._kv = kv
        self._context_length = context_length
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, qkv: Tensor, heads: Heads, layer: int, positions: Tensor, slots: Tensor
    ) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) D] is overwritten; slots [T], -1: nowhere. Returns the queries [T, heads, D],
        a view.

        The first call for a `Heads.rope` makes the table of angles, and Triton compiles at the first call of a kind:
        neither can be recorded, so a step runs once before it is captured.
        """
        rotary_store(
            qkv,
            self._kv[layer],
            *self._table(heads.rope),
            positions,
            slots,
            heads.q_norm,
            heads.k_norm,
            self._num_heads,
        )
        return qkv.view(len(qkv), -1, self._head_dim)[:, : self._num_heads]

    def _table(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._angles:
            self._angles[rope] = rope.at(
                torch.arange(self._context_length, device=self._kv[0].k.device)
            )
        return self._angles[rope]

"""Attention to the keys that an indexer chooses, in plain torch, one request after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.executor.backend import AttentionBatch
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Chooser, Heads
from weft.models.layers.rope import RotaryTables
from weft.ops.indexed import chosen_keys, index_scores

QUERY_BLOCK = 128  # queries of one request that share a call


class IndexQueries(NamedTuple):
    """What the tokens of a step bring to the keys of an indexer."""

    q: Tensor  # [T, heads, D], rotated
    weights: Tensor  # [T, heads]


class IndexedAttention:
    """What `TorchPaged` computes of layers with an indexer."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def store(
        self,
        columns: Tensor,
        chooser: Chooser,
        tables: RotaryTables | None,
        slots: Tensor,
        layer: int,
    ) -> IndexQueries:
        """Rotate queries and keys of an indexer, and store the keys. `columns` [T, ..] are those of
        `Chooser`, `slots` [T]."""
        assert tables is not None
        heads, head_dim = chooser.heads, chooser.head_dim
        of_heads, weights = columns.split_with_sizes(((heads + 1) * head_dim, heads), 1)
        by_head = of_heads.reshape(-1, heads + 1, head_dim)
        q, k = chooser.rope.rotate(by_head[:, :heads], by_head[:, heads:], tables)
        keys = self._pool.index[layer]
        keys.index_copy_(0, slots, k.to(keys.dtype))
        return IndexQueries(q.to(keys.dtype), weights)

    def overwrite(
        self, by_index: IndexQueries, q: Tensor, heads: Heads, layer: int, out: Tensor
    ) -> None:
        """Attend with the tokens that see more keys than are chosen: q [T, heads, D] -> their rows
        of `out`, of the same shape. Keys and values are latents."""
        batch = self._batch
        assert batch is not None, "prepare() comes first"
        assert heads.chooser is not None
        num_chosen = heads.chooser.num_chosen
        end = 0
        for row, cached, num in zip(batch.rows, batch.starts, batch.lens, strict=True):
            end += int(num)
            num_seen = int(cached) + int(num)
            if num_seen <= num_chosen:
                continue
            slots = batch.table[int(row)][:num_seen].long()
            index_keys = self._pool.index[layer].index_select(0, slots)[:, 0]
            keys = self._pool.k[layer].index_select(0, slots)[:, 0]
            begin = end - min(int(num), num_seen - num_chosen)
            for first in range(begin, end, QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, end)
                seen = torch.arange(first, last, device=q.device) - end + num_seen + 1
                scores = index_scores(
                    by_index.q[first:last], index_keys, by_index.weights[first:last]
                )
                chosen = chosen_keys(scores, seen, num_chosen)
                out[first:last] = _attend(q[first:last], keys, chosen, heads)


def _attend(q: Tensor, keys: Tensor, chosen: Tensor, heads: Heads) -> Tensor:
    """q [n, heads, D], keys [L, D], which are values, too, and booleans [n, L] -> as q"""
    shared = keys.expand(1, 1, *keys.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        shared,
        shared,
        attn_mask=chosen,
        scale=heads.score_scale(q.shape[-1]),
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)

"""Attention to what the encoder has read for each request, in plain torch: correct on every device,
and the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray
from weft.executor.kv_pool import EncodedPool


class TorchEncoded:
    """The `EncodedKv` in torch."""

    def __init__(self, pool: EncodedPool) -> None:
        self._pool = pool
        self.width = pool.width
        self._rows: list[int] = []
        self._lens: list[int] = []
        # Queries of the last step, by layer: [T, heads, head_dim]
        self._queries: dict[int, Tensor] = {}

    def write(self, row: int, vectors: Tensor) -> None:
        self._pool.write(row, vectors)

    def prepare(self, rows: IntArray, lens: IntArray) -> None:
        self._rows = rows.tolist()
        self._lens = lens.tolist()

    def attend(self, q: Tensor, layer: int) -> Tensor:
        keys = self._pool.keys[layer]
        values = self._pool.values[layer]
        num = self._pool.num_positions
        _, heads, head_dim, _ = keys.shape
        queries = q.view(-1, heads, head_dim)
        self._queries[layer] = queries
        pieces = []
        for row, of_row in zip(self._rows, queries.split_with_sizes(self._lens), strict=True):
            pieces.append(
                F.scaled_dot_product_attention(
                    of_row.transpose(0, 1).float(),
                    keys[row, :, :, :num].transpose(1, 2),
                    values[row, :, :num],
                ).transpose(0, 1)
            )
        return torch.cat(pieces).flatten(1).to(q.dtype)

    def weights(self, row: int, places: slice, heads: Sequence[tuple[int, int]]) -> Tensor:
        return weights_of(
            self._pool, row, [(self._queries[n][places], n, head) for n, head in heads]
        )


def weights_of(pool: EncodedPool, row: int, of_heads: Sequence[tuple[Tensor, int, int]]) -> Tensor:
    """The weights of single heads, each with the queries [n, heads, head_dim] of its layer, the
    layer and its number there: [heads, n, num_positions]"""
    found = []
    for queries, layer, head in of_heads:
        keys = pool.keys[layer][row, head, :, : pool.num_positions]
        scores = queries[:, head].float() @ keys * keys.shape[0] ** -0.5
        found.append(scores.softmax(-1))
    return torch.stack(found)

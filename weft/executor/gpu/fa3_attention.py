"""Paged attention by FlashAttention-3, a package for GPUs of compute capability 9.0. It has never run here: what it is
told follows its documentation (github.com/Dao-AILab/flash-attention, `hopper/flash_attn_interface.py`).

Its pages may be of one token, and so the table of slots is its page table as it stands, whatever `--page-size` is:
`cache_batch_idx` says which line of it belongs to which request, and nothing is gathered.

    K and V    [slots, 1, kv_heads, D]        a view of the pool: a page is a slot
    q          [T, heads, D]                  request r's stand at cu_seqlens_q[r] : cu_seqlens_q[r + 1]

A request that is padding has no queries, and is left alone; the queries behind those of the last request, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from weft.config.model import ModelConfig
from weft.executor.attention_layout import Size, Tiling
from weft.executor.backend import AttentionBatch
from weft.executor.gpu.providers import provider
from weft.executor.gpu.shipping import paged_step
from weft.executor.gpu.store import Store
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.ops.triton.paged import Kv, PagedStep
from weft.plan.step import IntArray

SPLIT_TOKENS = (
    2048  # of scratch, in float32 for all heads: a step of so many tokens is not cut into splits
)
MAX_SPLITS = 64
WHOLE = 1 << 30  # rows of a tile: the kernels cut the queries themselves


class Step(NamedTuple):
    there: PagedStep
    max_len: int  # tokens of one request in the step, at most
    max_splits: int  # into which the kernels may cut the cached tokens of a request; how many they take, they decide


class Fa3Paged:
    """An `AttentionBackend`. `tiling` lays steps out for it."""

    def __init__(self, config: ModelConfig, pool: KVPool, context_length: int) -> None:
        """Positions are below `context_length`. Raises NoProvider without the package."""
        self._attend = provider("fa3").flash_attn_with_kvcache
        self.tiling = Tiling(config.num_heads, config.num_kv_heads, WHOLE, 1)
        self._config = config
        self._pages = [
            (k.unsqueeze(1), v.unsqueeze(1)) for k, v in zip(pool.k, pool.v, strict=True)
        ]
        self._store = Store(
            config, [Kv(k, v) for k, v in zip(pool.k, pool.v, strict=True)], context_length
        )
        self._step: Step | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        there, size = paged_step(batch, self.tiling)
        largest = (
            1 if size.num_decodes else size.num_tokens
        )  # all that is known while a step is captured
        max_len = int(batch.lens.max()) if len(batch.lens) else largest
        self._step = Step(there, max_len, max_splits(size.num_tokens))

    def expect(self, starts: IntArray, lens: IntArray, size: Size) -> None:
        """Nothing: the kernels find all numbers on the device."""

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        """As `PagedAttention.forward`; what it returns for tokens that are padding may be anything at all."""
        assert self._step is not None, "prepare() comes first"
        there, max_len, splits = self._step
        q = self._store(qkv, heads, layer, there.positions, there.out_slots)
        k, v = self._pages[layer]
        window = self._config.window(layer)
        out: Tensor = self._attend(
            q,
            k,
            v,
            cache_seqlens=there.kv_lens,
            cache_batch_idx=there.rows,
            page_table=there.table,
            cu_seqlens_q=there.q_indptr,
            max_seqlen_q=max_len,
            softmax_scale=1 / math.sqrt(self._config.head_dim),
            causal=True,
            window_size=(window - 1, 0)
            if window
            else (-1, -1),  # tokens before it that a token sees
            num_splits=splits,
        )
        return out.flatten(1)


def max_splits(num_tokens: int) -> int:
    """The kernels keep a part of every token's output for each split they may make: as many as leave that small."""
    return max(1, min(MAX_SPLITS, SPLIT_TOKENS // num_tokens))

"""Paged attention by the Triton kernels: reads the table of slots itself, gathers nothing, and waits for nothing.

All that a launch depends on is the `Size` of the step (`layout.py`): grids are made of it, nothing is read from the
device, and what changes from step to step is read through pointers. So `forward` can be recorded in a CUDA graph, and
played again for any step that is laid out in that size and copied to where the first one lay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.executor.attention_layout import Size, Tiling
from weft.executor.backend import AttentionBatch
from weft.executor.gpu.shipping import paged_step
from weft.executor.gpu.store import Store
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.ops.triton.decode import decode
from weft.ops.triton.extend import extend
from weft.ops.triton.launches import extend_launch
from weft.ops.triton.paged import Kv, PagedStep

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)  # of KV


class TritonPaged:
    """An `AttentionBackend`. `tiling` lays steps out for it."""

    def __init__(self, config: ModelConfig, pool: KVPool, context_length: int) -> None:
        """Positions are below `context_length`. Raises ValueError for a type of KV that the kernels do not read."""
        dtype, device = pool.k[0].dtype, pool.k[0].device
        if dtype not in DTYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ValueError(
                f"the Triton kernels cannot keep KV in {str(dtype).removeprefix('torch.')}; they can in {names}"
            )
        group = config.num_heads // config.num_kv_heads
        self.tiling = Tiling(
            config.num_heads,
            config.num_kv_heads,
            extend_launch(config.head_dim, group).rows,
            _num_processors(device),
        )
        self._config = config
        self._kv = [
            Kv(k, v, *scale) for k, v, scale in zip(pool.k, pool.v, pool.layer_scales, strict=True)
        ]
        self._store = Store(config, self._kv, context_length)
        self._step: PagedStep | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._step, _ = paged_step(batch, self.tiling)

    def expect(self, starts: IntArray, lens: IntArray, size: Size) -> None:
        """Nothing: the launches follow from the size alone."""

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        """As `PagedAttention.forward`; what it returns for tokens that are padding may be anything at all."""
        step, config, kv = self._step, self._config, self._kv[layer]
        assert step is not None, "prepare() comes first"
        q = self._store(qkv, heads, layer, step.positions, step.out_slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        scale, window = 1 / math.sqrt(config.head_dim), config.window(layer)
        if len(step.tile_req):
            extend(q, kv, step, out, scale, window)
        if len(step.decode_req):
            decode(q, kv, step, out, scale, window)
        return out.flatten(1)


def _num_processors(device: torch.device) -> int:
    """Triton's interpreter on a CPU does one program after the other."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )

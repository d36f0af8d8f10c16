"""Paged attention by the Triton kernels: reads the table of slots itself, gathers nothing, and waits for nothing.

All that a launch depends on is the `Size` of the step (`layout.py`): grids are made of it, nothing is read from the
device, and what changes from step to step is read through pointers. So `forward` can be recorded in a CUDA graph, and
played again for any step that is laid out in that size and copied to where the first one lay.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.executor.attention.layout import Tiling
from weft.executor.backend import AttentionBatch
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.triton.decode import decode
from weft.ops.triton.extend import extend
from weft.ops.triton.launches import extend_launch
from weft.ops.triton.paged import Kv, PagedStep
from weft.ops.triton.rotary import rotary_store

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)  # of KV


class TritonPaged:
    """An `AttentionBackend`. `tiling` lays steps out for it."""

    def __init__(
        self, config: ModelConfig, pool: KVPool, context_length: int, kv_scales: list[tuple[float, float]] | None = None
    ) -> None:
        """Positions are below `context_length`. KV in eight bits is kept divided by the layer's scales, `kv_scales`
        [layers] of K and of V, 1 if not given. Raises ValueError for a type of KV that the kernels do not read."""
        dtype, device = pool.k[0].dtype, pool.k[0].device
        if dtype not in DTYPES:
            names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise ValueError(
                f"the Triton kernels cannot keep KV in {str(dtype).removeprefix('torch.')}; they can in {names}"
            )
        group = config.num_heads // config.num_kv_heads
        self.tiling = Tiling(
            config.num_heads, config.num_kv_heads, extend_launch(config.head_dim, group).rows, _num_processors(device)
        )
        self._config, self._context_length, self._device = config, context_length, device
        scales = kv_scales or [(1.0, 1.0)] * config.num_layers
        self._kv = [Kv(k, v, *scale) for k, v, scale in zip(pool.k, pool.v, scales, strict=True)]
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._step: PagedStep | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        """Let `forward` read this step from now on: as it was shipped, whatever will stand there by then; or lay it out
        and copy it in one transfer."""
        if batch.shipped is not None:
            layout, size = batch.shipped
            self._step = PagedStep._make((*layout, batch.table, size.num_splits))
            return
        size = self.tiling.size(batch.lens)
        slots = np.zeros(size.num_tokens, np.int32)  # they are on the device already
        arrays = self.tiling.lay_out(batch.rows, batch.starts, batch.lens, slots, size)
        packed = torch.from_numpy(np.concatenate(arrays)).to(self._device)
        *parts, _ = packed.split_with_sizes([len(part) for part in arrays])
        self._step = PagedStep._make((*parts, batch.slots.int(), batch.table, size.num_splits))

    def forward(self, qkv: Tensor, heads: Heads, layer: int) -> Tensor:
        """As `PagedAttention.forward`; what it returns for tokens that are padding may be anything at all.

        Its first call for a `Heads.rope` makes the table of angles, and Triton compiles at the first call of a kind:
        neither can be recorded, so a step runs once before it is captured.
        """
        step, config, kv = self._step, self._config, self._kv[layer]
        assert step is not None, "prepare() comes first"
        rotary_store(
            qkv,
            kv,
            *self._table(heads.rope),
            step.positions,
            step.out_slots,
            heads.q_norm,
            heads.k_norm,
            config.num_heads,
        )
        q = qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        scale, window = 1 / math.sqrt(config.head_dim), config.window(layer)
        if len(step.tile_req):
            extend(q, kv, step, out, scale, window)
        if len(step.decode_req):
            decode(q, kv, step, out, scale, window)
        return out.flatten(1)

    def _table(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._angles:
            self._angles[rope] = rope.at(torch.arange(self._context_length, device=self._device))
        return self._angles[rope]


def _num_processors(device: torch.device) -> int:
    """Triton's interpreter on a CPU does one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

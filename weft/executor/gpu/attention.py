"""Paged attention by the Triton kernels: they read the table of slots themselves, without a gather
and without waiting.

All launches depend only on the `StepSize`: grids follow from it, no number is read back from the
device, and the kernels read what changes from step to step through pointers. So `forward` can be
recorded in a CUDA graph, and replayed for any step that has a layout of that size and is copied to
the memory of the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch, DeviceLayout, StepSize
from weft.executor.gpu.layout import Tiling
from weft.executor.kv_pool import KVPool
from weft.executor.plain.attention import TorchPaged
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.triton.decode import decode
from weft.ops.triton.extend import extend
from weft.ops.triton.launches import extend_launch
from weft.ops.triton.paged import Kv, PagedStep, Terms
from weft.ops.triton.rotary import rotary_store

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)  # of KV


class TritonPaged:
    """The `GpuAttentionBackend` of our kernels."""

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        context_length: int,
    ) -> None:
        """Positions must be below `context_length`. Raises ValueError for a type of KV that the
        kernels cannot read."""
        dtype = pool.k[0].dtype
        if dtype not in DTYPES:
            names = ", ".join(_name(known) for known in DTYPES)
            raise ValueError(
                f"the Triton kernels cannot keep KV in {_name(dtype)}; they can in {names}"
            )
        group = config.num_heads // config.num_kv_heads
        self.tiling = Tiling(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            tile_rows=extend_launch(config.head_dim, group).rows,
            num_processors=_num_processors(pool.k[0].device),
        )
        self._config = config
        self._kv = []
        for layer, (k_scale, v_scale) in enumerate(pool.layer_scales):
            self._kv.append(Kv(pool.k[layer], pool.v[layer], k_scale, v_scale))
        self._store = RotaryStore(config, self._kv, context_length)
        self._step: PagedStep | None = None
        # The same, of layers with windows, if these have slots of their own.
        self._window_step: PagedStep | None = None
        # For a model whose picture tokens see later ones: the kernels cannot do that, so torch
        # computes the steps with such tokens.
        self._by_torch: TorchPaged | None = None
        if config.vision is not None and config.vision.rules.sees_both_ways:
            if dtype == torch.float8_e4m3fn:
                raise ValueError(
                    f"{config.name} with KV in {_name(dtype)} takes no pictures on a GPU: their "
                    "tokens see each other both ways; --kv-dtype bf16 or --language-model-only"
                )
            self._by_torch = TorchPaged(config, pool)
        self._is_both_ways = False

    def prepare(self, batch: AttentionBatch) -> None:
        self._is_both_ways = batch.sees_to is not None
        if self._is_both_ways:
            assert self._by_torch is not None, "the model's tokens see no later tokens"
            self._by_torch.prepare(batch)
            return
        layout = batch.layout or _lay_out(batch, self.tiling)
        self._step = PagedStep._make((*layout.arrays, batch.table, layout.size.num_splits))
        self._window_step = None
        if batch.window is not None:
            slots, table = batch.window
            self._window_step = self._step._replace(out_slots=slots.int(), table=table)
        self._store.begin(batch.rotation)

    def expect(
        self,
        starts: IntArray,
        lens: IntArray,
        size: StepSize,
    ) -> None:
        """The launches follow from the size alone. Steps of graphs have no pictures."""
        self._is_both_ways = False

    def narrow(self, x: Tensor) -> Tensor:
        return x

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        """Like `PagedAttention.forward`; the output for padding tokens is undefined."""
        if self._is_both_ways:
            assert self._by_torch is not None
            return self._by_torch.forward(qkv, heads, layer)
        step = self._step
        window = self._config.window(layer)
        if window and self._window_step is not None:
            step = self._window_step
        assert step is not None, "prepare() comes first"
        kv = self._kv[layer]
        head_dim = self._config.head_dim
        q = self._store(
            qkv,
            heads,
            layer,
            step.positions,
            step.out_slots,
        )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        gate = None
        if heads.is_gated:
            by_head = qkv.view(len(qkv), -1, head_dim)
            gate = by_head[:, 1 : 2 * self._config.num_heads : 2]
        terms = Terms(
            heads.score_scale(head_dim),
            window,
            heads.cap,
            heads.sinks,
            gate,
            self._config.sight(layer).chunked,
        )
        # Lengths of layouts are on the host and fixed by the size of a graph, so they may be read
        # here.
        if len(step.tile_req):
            extend(q, kv, step, out, terms)
        if len(step.decode_req):
            decode(q, kv, step, out, terms)
        return out.flatten(1)


class RotaryStore:
    """The work before attention: norms of heads, rotation, and storing K and V in their slots.

    `kv` has one entry for each layer; positions are below `context_length`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: Sequence[Kv],
        context_length: int,
    ) -> None:
        self._num_heads = config.num_heads
        self._head_dim = config.head_dim
        self._kv = kv
        self._context_length = context_length
        self._angles: dict[Rope | None, tuple[Tensor, Tensor]] = {}
        self._orders: dict[Rope, Tensor] = {}  # of the values of a head
        # For a step whose tokens have three positions: these [3, T], and the angles of each token.
        self._rotation: Tensor | None = None
        self._of_step: dict[Rope, tuple[Tensor, Tensor]] = {}

    def begin(self, rotation: IntArray | None) -> None:
        """Begin a step whose tokens are rotated by `rotation` (`AttentionBatch.rotation`)."""
        self._rotation = None
        self._of_step.clear()
        if rotation is not None:
            self._rotation = torch.from_numpy(rotation).to(self._kv[0].k.device)

    def __call__(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
        positions: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Overwrites qkv [T, (heads + 2 kv_heads) D]; slots [T], -1: not stored. Returns the
        queries [T, heads, D], a view.

        The first call for a `Heads.rope` makes the table of angles, and Triton compiles a kernel in
        its first call. Neither can be recorded, so a step runs once before it is captured.
        """
        cos, sin = self._table(heads.rope)
        if heads.rope is not None and self._rotation is not None:
            # A row for each token, so that the kernel need not know three positions.
            if heads.rope not in self._of_step:
                self._of_step[heads.rope] = self._angles_at(heads.rope, self._rotation)
            cos, sin = self._of_step[heads.rope]
            positions = torch.arange(len(cos), device=cos.device, dtype=positions.dtype)
        heads = self._put_in_order(qkv, heads)
        rotary_store(
            qkv,
            self._kv[layer],
            cos,
            sin,
            positions,
            slots,
            heads.q_norm,
            heads.k_norm,
            self._num_heads,
            self._queries(qkv, heads).stride(1),
        )
        q = self._queries(qkv, heads)
        # Only models whose queries are scaled by position need this pass, so the kernel has no such
        # factor.
        q_scale = None
        if heads.rope is not None:
            q_scale = heads.rope.query_scale(positions)
        if q_scale is not None:
            q.mul_(q_scale[:, None, None].to(q.dtype))
        return q

    def _queries(self, qkv: Tensor, heads: Heads) -> Tensor:
        """[T, heads, D], a view"""
        by_head = qkv.view(len(qkv), -1, self._head_dim)
        step = 2 if heads.is_gated else 1
        return by_head[:, : step * self._num_heads : step]

    def _table(self, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine for all pairs of a head; pairs that are not rotated have the angle 0."""
        if rope not in self._angles:
            positions = torch.arange(self._context_length, device=self._kv[0].k.device)
            self._angles[rope] = self._angles_at(rope, positions)
        return self._angles[rope]

    def _angles_at(self, rope: Rope | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """At positions [N] or [3, N], each [N, D / 2]."""
        num = positions.shape[-1]
        cos = torch.ones(num, self._head_dim // 2, device=positions.device)
        sin = torch.zeros_like(cos)
        if rope is not None:
            num_pairs = rope.rotary_dim // 2
            cos[:, :num_pairs], sin[:, :num_pairs] = rope.at(positions)
        return cos, sin

    def _put_in_order(self, qkv: Tensor, heads: Heads) -> Heads:
        """Reorder the values of queries and keys if pairs are not (i, i + D / 2); scores stay the
        same. This is an extra pass that other models do not need. Returns the heads with the
        weights of their norms in the same order: they are read anew, because they may change."""
        rope = heads.rope
        if rope is None or not rope.rotary_dim:
            return heads
        if rope.rotary_dim == self._head_dim and not rope.side_by_side:
            return heads
        if rope not in self._orders:
            self._orders[rope] = _order_of_pairs(self._head_dim, rope).to(qkv.device)
        kv_heads = self._kv[0].k.shape[1]
        keys = qkv.view(len(qkv), -1, self._head_dim)[:, -2 * kv_heads : -kv_heads]
        order = self._orders[rope]
        for turned in (self._queries(qkv, heads), keys):
            turned.copy_(turned[..., order])
        if heads.q_norm is None or heads.k_norm is None:
            return heads
        return heads._replace(
            q_norm=heads.q_norm._replace(weight=heads.q_norm.weight[order]),
            k_norm=heads.k_norm._replace(weight=heads.k_norm.weight[order]),
        )


def _order_of_pairs(head_dim: int, rope: Rope) -> Tensor:
    """First values of all pairs, then second ones: rotated pairs before the others. [head_dim]"""
    turning = torch.arange(rope.rotary_dim)
    first = turning[: rope.rotary_dim // 2]
    second = turning[rope.rotary_dim // 2 :]
    if rope.side_by_side:
        first = turning[0::2]
        second = turning[1::2]
    others = torch.arange(rope.rotary_dim, head_dim)
    middle = len(others) // 2
    return torch.cat((first, others[:middle], second, others[middle:]))


def _lay_out(batch: AttentionBatch, tiling: Tiling) -> DeviceLayout:
    """The layout of a step that was uploaded without one, in a separate copy."""
    size = tiling.size(batch.lens)
    # The slots are on the device already: the host writes zeros, which are replaced below.
    slots = np.zeros(size.num_tokens, np.int32)
    arrays = tiling.lay_out(
        batch.rows,
        batch.starts,
        batch.lens,
        slots,
        size,
    )
    packed = torch.from_numpy(np.concatenate(arrays)).to(batch.table.device)
    *others, _ = packed.split_with_sizes([len(array) for array in arrays])
    return DeviceLayout((*others, batch.slots.int()), size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter on a CPU runs one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count

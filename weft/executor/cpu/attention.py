"""Paged attention by the CPU kernels: they read the slot table themselves, without a gather.

`forward` records; the recorded program runs on `step`, which `prepare` fills.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch
from weft.executor.cpu.indexed import attend_to_chosen, index_caches, store_index
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.models.layers.rope import Rope
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.ops import CppOps
from weft.ops.fusion import Value, activation, tensor_of

FORMATS = {
    torch.float32: KvFormat.F32,
    torch.bfloat16: KvFormat.BF16,
    torch.int8: KvFormat.I8,
}


class RotaryTable(NamedTuple):
    """The factors of a rotation at each position."""

    cos: Tensor  # [context, rotary_dim / 2]
    sin: Tensor
    q_scale: Tensor | None  # [context]
    axes: Tensor | None  # [rotary_dim / 2] uint8


class CppPaged:
    """The `AttentionBackend` for recorded programs."""

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        ops: CppOps,
        context_length: int,
    ) -> None:
        """Positions must be below `context_length`. Raises ValueError for a type of KV that the
        kernels cannot read."""
        dtype = pool.k[0].dtype
        if dtype not in FORMATS:
            raise ValueError(
                f"the CPU kernels cannot keep KV in {dtype}; they can in float32, bfloat16 and int8"
            )
        self.step = abi.StepArgs()
        self._config = config
        self._pool = pool
        self._ops = ops
        self._context_length = context_length
        self._tables: dict[Rope, RotaryTable] = {}
        # `step` and the caches have plain addresses: these attributes keep the memory alive.
        self._batch: AttentionBatch | None = None
        format = FORMATS[dtype]
        self._caches = [self._cache(layer, format) for layer in range(config.num_layers)]
        self._index_caches = index_caches(pool, format)
        self._without_heads: list[abi.KvCache] = []

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        step = self.step
        step.num_requests = len(batch.rows)
        step.positions = batch.positions.data_ptr()
        step.slots = batch.slots.data_ptr()
        step.rows = batch.rows.ctypes.data
        step.starts = batch.starts.ctypes.data
        step.lens = batch.lens.ctypes.data
        step.table = batch.table.data_ptr()
        step.table_stride = batch.table.stride(0)
        step.rotation = None if batch.rotation is None else batch.rotation.ctypes.data
        step.sees_to = None if batch.sees_to is None else batch.sees_to.ctypes.data
        if batch.window is not None:
            step.window_slots = batch.window.slots.data_ptr()
            step.window_table = batch.window.table.data_ptr()

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        config = self._config
        _, head_dim = config.kv_shape(layer)
        recorder = self._ops.recorder
        q_norm = None if heads.q_norm is None else heads.q_norm.weight.data_ptr()
        k_norm = None if heads.k_norm is None else heads.k_norm.weight.data_ptr()
        stored_in = self._caches[layer]
        if heads.reads_earlier:
            stored_in = self._nothing(head_dim)
        rotary_store = abi.RotaryStoreArgs(
            cache=ctypes.addressof(stored_in),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            heads=config.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=0.0 if heads.q_norm is None else heads.q_norm.eps,
            v_eps=heads.value_eps,
            values_are_keys=heads.values_are_keys,
        )
        if heads.is_gated:
            rotary_store.q_head_stride = 2 * head_dim
        if heads.rope is not None and heads.norms_rotated:
            recorder.add(self._rotated_first(qkv, heads.rope, layer))
        elif heads.rope is not None:
            self._rotate_by(heads.rope, rotary_store)
        recorder.add(rotary_store)
        if heads.chooser is not None:
            index_store = store_index(qkv, heads.chooser, self._index_caches[layer])
            self._rotate_by(heads.chooser.rope, index_store)
            recorder.add(index_store)
        if heads.narrows:
            self.narrow(qkv)
        out = recorder.buffer(config.num_heads * head_dim)
        attention = abi.AttentionArgs(
            cache=ctypes.addressof(self._caches[layer]),
            q=qkv.data_ptr(),
            q_stride=qkv.stride(0),
            out=out.data_ptr(),
            heads=config.num_heads,
            window=config.window(layer),
            chunked=config.sight(layer).chunked,
            scale=heads.score_scale(head_dim),
            cap=heads.cap,
            sees_no_later=not heads.sees_later,
        )
        if heads.sinks is not None:
            attention.sinks = heads.sinks.data_ptr()
        if heads.biases is not None:
            values, reach = heads.biases
            attention.biases = values[:, reach:].data_ptr()
            attention.bias_stride = values.stride(0)
        if heads.is_gated:
            attention.head_stride = 2 * head_dim
            attention.gate = qkv[:, head_dim:].data_ptr()
        recorder.add(attention)
        if heads.chooser is not None:
            index = self._index_caches[layer]
            recorder.add(attend_to_chosen(qkv, heads.chooser, index, attention, recorder))
        return out

    def narrow(self, x: Tensor) -> Tensor:
        """Recorded for every step; only fused steps narrow."""
        rows = tensor_of(x)
        args = abi.NarrowArgs(rows.data_ptr(), rows.stride(0), rows.shape[1])
        self._ops.recorder.add(args)
        return activation(Value(rows))

    def _cache(self, layer: int, format: KvFormat) -> abi.KvCache:
        pool = self._pool
        kv_heads, head_dim = self._config.kv_shape(layer)
        cache = abi.KvCache(
            format=format,
            kv_heads=kv_heads,
            head_dim=head_dim,
            k=pool.k[layer].data_ptr(),
            v=pool.v[layer].data_ptr(),
            windowed=pool.has_windows and self._config.window(layer) > 0,
        )
        if format == KvFormat.I8:
            cache.k_scale = pool.k_scale[layer].data_ptr()
            cache.v_scale = pool.v_scale[layer].data_ptr()
        return cache

    def _rotated_first(self, qkv: Tensor, rope: Rope, layer: int) -> abi.RotaryStoreArgs:
        """Rotates queries and keys where they are: all are as queries, and nothing is stored."""
        kv_heads, head_dim = self._config.kv_shape(layer)
        args = abi.RotaryStoreArgs(
            cache=ctypes.addressof(self._nothing(head_dim)),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            heads=self._config.num_heads + kv_heads,
        )
        self._rotate_by(rope, args)
        return args

    def _nothing(self, head_dim: int) -> abi.KvCache:
        """A cache without heads: nothing is stored in it."""
        nothing = abi.KvCache(format=KvFormat.F32, kv_heads=0, head_dim=head_dim)
        self._without_heads.append(nothing)
        return nothing

    def _rotate_by(self, rope: Rope, args: abi.RotaryStoreArgs) -> None:
        # For all positions at once: a step then reads angles instead of computing sines, and
        # programs keep the address of the table.
        if rope not in self._tables:
            positions = torch.arange(self._context_length)
            axes = None if rope.axes is None else rope.axes.to(torch.uint8)
            q_scale = rope.query_scale(positions)
            self._tables[rope] = RotaryTable(*rope.at(positions), q_scale, axes)
        table = self._tables[rope]
        args.rotary_dim = rope.rotary_dim
        args.cos = table.cos.data_ptr()
        args.sin = table.sin.data_ptr()
        args.side_by_side = rope.side_by_side
        if table.q_scale is not None:
            args.q_scale = table.q_scale.data_ptr()
        if table.axes is not None:
            args.axes = table.axes.data_ptr()

"""Attention within whole prompts by the CPU kernels. The output of the projection is their cache,
or what an operation makes of it in fewer bits: a slot is the index of a token in the step.

`forward` records; the recorded program runs on `step`, which `prepare` fills.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.models.layers.encoder import PLAIN_HEADS, EncoderHeads
from weft.models.layers.rope import Rope
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.ops import CppOps

ELEMENTS = {KvFormat.BF16: torch.bfloat16, KvFormat.I16: torch.int16}
MOST_DIMS_OF_SHORTS = 256  # sums of as many products have room in 32 bits


class CppBidirectional:
    """The `EncoderAttention` for recorded programs.

    `kept`: how keys and values are kept for a layer. In float32 they stay where they are; shorts
    are for at most `MOST_DIMS_OF_SHORTS` dims of a head. `context_length`: of models that rotate.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        ops: CppOps,
        kept: KvFormat = KvFormat.F32,
        context_length: int = 0,
    ) -> None:
        self._context_length = context_length
        self.step = abi.StepArgs()
        self._kept = kept
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._ops = ops
        # 0, 1, ..: the slot table; the row of a prompt begins at its first token.
        self._places = np.empty(0, np.int32)
        self._slots = np.empty(0, np.int64)  # the same, of tokens
        self._arrays: list[IntArray] = []  # `step` points to them
        self._caches: list[abi.KvCache] = []  # programs point to them
        # Cosines and sines at each position.
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._nothing = abi.KvCache(format=KvFormat.F32, kv_heads=0, head_dim=head_dim)

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt, one after another."""
        ends = np.cumsum(lens, dtype=np.int32)
        if ends[-1] > len(self._places):
            self._places = np.arange(2 * ends[-1], dtype=np.int32)
            self._slots = self._places.astype(np.int64)
        rows = ends - lens
        starts = np.zeros(len(lens), np.int32)
        lens = np.ascontiguousarray(lens, np.int32)
        self._arrays = [rows, starts, lens]
        step = self.step
        step.num_requests = len(lens)
        step.rows = rows.ctypes.data
        step.starts = starts.ctypes.data
        step.lens = lens.ctypes.data
        step.table = self._places.ctypes.data
        step.table_stride = 1
        if self._kept != KvFormat.F32:
            step.slots = self._slots.ctypes.data
            step.positions = self._slots.ctypes.data  # nothing is rotated by them

    def forward(self, qkv: Tensor, heads: EncoderHeads = PLAIN_HEADS) -> Tensor:
        assert heads.distances is None, "torch computes models with vectors of distances"
        if heads.rope is not None:
            self._rotate(qkv, heads.rope)
        size = self._num_heads * self._head_dim
        recorder = self._ops.recorder
        out = recorder.buffer(size)
        cache = abi.KvCache(
            format=self._kept,
            kv_heads=self._num_heads,
            head_dim=self._head_dim,
        )
        # One cache for each recorded layer: k and v are in the layer's own buffers.
        self._caches.append(cache)
        buffers: list[Tensor] = []
        if self._kept == KvFormat.F32:
            cache.k = qkv[:, size:].data_ptr()
            cache.v = qkv[:, 2 * size :].data_ptr()
            cache.stride = qkv.stride(0)
        else:
            buffers = self._store(qkv[:, size:], cache)
        attention = abi.AttentionArgs(
            cache=ctypes.addressof(cache),
            q=qkv.data_ptr(),
            q_stride=qkv.stride(0),
            out=out.data_ptr(),
            heads=self._num_heads,
            scale=heads.score_scale(self._head_dim),
            window=heads.window,
            bidirectional=1,
            may_round=self._ops.may_round,
        )
        if heads.biases is not None:
            values, reach = heads.biases
            attention.biases = values[:, reach:].data_ptr()
            attention.bias_stride = values.stride(0)
        recorder.add(attention)
        del buffers  # only now may the next operations have them
        return out

    def _rotate(self, qkv: Tensor, rope: Rope) -> None:
        """Record that queries and keys are rotated where they are."""
        if rope not in self._tables:
            self._tables[rope] = rope.at(torch.arange(self._context_length))
        cos, sin = self._tables[rope]
        args = abi.RotaryStoreArgs(
            cache=ctypes.addressof(self._nothing),
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            heads=2 * self._num_heads,
            rotary_dim=rope.rotary_dim,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            side_by_side=rope.side_by_side,
        )
        self._ops.recorder.add(args)

    def _store(self, keys_values: Tensor, cache: abi.KvCache) -> list[Tensor]:
        """Record that keys and values, which stand one after the other in a row, are rounded into
        buffers of their own. Returns the buffers."""
        recorder = self._ops.recorder
        size = self._num_heads * self._head_dim
        element = ELEMENTS[self._kept]
        k, v = (recorder.buffer(size, element) for _ in range(2))
        k_scale, v_scale = (recorder.buffer(self._num_heads) for _ in range(2))
        cache.k = k.data_ptr()
        cache.v = v.data_ptr()
        cache.k_scale = k_scale.data_ptr()
        cache.v_scale = v_scale.data_ptr()
        store = abi.RotaryStoreArgs(
            cache=ctypes.addressof(cache),
            qkv=keys_values.data_ptr(),
            qkv_stride=keys_values.stride(0),
        )
        recorder.add(store)
        return [k, v, k_scale, v_scale]

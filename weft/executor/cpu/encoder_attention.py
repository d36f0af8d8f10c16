"""Attention within whole prompts by the CPU kernels. The output of the projection is their cache: a
slot is the index of a token in the step.

`forward` records; the recorded program runs on `step`, which `prepare` fills.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.ops import CppOps


class CppBidirectional:
    """The `EncoderAttention` for recorded programs."""

    def __init__(self, num_heads: int, head_dim: int, ops: CppOps) -> None:
        self.step = abi.StepArgs()
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._ops = ops
        # 0, 1, ..: the slot table; the row of a prompt begins at its first token.
        self._places = np.empty(0, np.int32)
        self._arrays: list[IntArray] = []  # `step` points to them
        self._caches: list[abi.KvCache] = []  # programs point to them

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt, one after another."""
        ends = np.cumsum(lens, dtype=np.int32)
        if ends[-1] > len(self._places):
            self._places = np.arange(2 * ends[-1], dtype=np.int32)
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

    def forward(self, qkv: Tensor) -> Tensor:
        size = self._num_heads * self._head_dim
        cache = abi.KvCache(
            format=KvFormat.F32,
            kv_heads=self._num_heads,
            head_dim=self._head_dim,
            k=qkv[:, size:].data_ptr(),
            v=qkv[:, 2 * size :].data_ptr(),
            stride=qkv.stride(0),
        )
        # One cache for each recorded layer: k and v are in the layer's own buffer.
        self._caches.append(cache)
        recorder = self._ops.recorder
        out = recorder.buffer(size)
        attention = abi.AttentionArgs(
            cache=ctypes.addressof(cache),
            q=qkv.data_ptr(),
            q_stride=qkv.stride(0),
            out=out.data_ptr(),
            heads=self._num_heads,
            scale=1 / math.sqrt(self._head_dim),
            bidirectional=1,
            may_round=self._ops.may_round,
        )
        recorder.add(attention)
        return out

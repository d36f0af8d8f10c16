"""Attention within whole prompts by the CPU kernels. Their cache is what the projection has just written: slots are
places in the step.

`forward` records; `step` is what the recorded program runs on, laid out by `prepare`.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.ops import CppOps


class CppWhole:
    def __init__(self, config: ModelConfig, ops: CppOps) -> None:
        self.step = abi.Step()
        self._config, self._ops = config, ops
        self._places = np.empty(
            0, np.int32
        )  # 0, 1, ..: the slot table; a prompt's line begins where the prompt does
        self._arrays: list[IntArray] = []  # what `step` points to
        self._caches: list[abi.KvCache] = []  # what programs point to

    def prepare(self, lens: IntArray, device: torch.device) -> None:
        """`lens` [R]: tokens of each prompt, which stand one behind the other."""
        ends = np.cumsum(lens, dtype=np.int32)
        if ends[-1] > len(self._places):
            self._places = np.arange(2 * ends[-1], dtype=np.int32)
        self._arrays = [
            ends - lens,
            np.zeros(len(lens), np.int32),
            np.ascontiguousarray(lens, np.int32),
        ]
        step = self.step
        step.num_requests = len(lens)
        step.rows, step.starts, step.lens = (array.ctypes.data for array in self._arrays)
        step.table, step.table_stride = self._places.ctypes.data, 1

    def forward(self, qkv: Tensor) -> Tensor:
        config = self._config
        size = config.num_heads * config.head_dim
        cache = abi.KvCache(
            format=KvFormat.F32,
            kv_heads=config.num_heads,
            head_dim=config.head_dim,
            k=qkv[:, size:].data_ptr(),
            v=qkv[:, 2 * size :].data_ptr(),
            stride=qkv.stride(0),
        )
        self._caches.append(cache)
        out = self._ops.recorder.buffer(size)
        self._ops.recorder.add(
            abi.AttentionArgs(
                cache=ctypes.addressof(cache),
                q=qkv.data_ptr(),
                q_stride=qkv.stride(0),
                out=out.data_ptr(),
                heads=config.num_heads,
                scale=1 / math.sqrt(config.head_dim),
                whole=1,
            )
        )
        return out

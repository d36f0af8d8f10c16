"""Computes towers in torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.executor.plain.encoder_attention import TorchBidirectional
from weft.ops.encoder import PlainEncoderOps


class TorchTowerAttention:
    """The `TowerAttention` in torch."""

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self._inner = TorchBidirectional(num_heads)
        self._device = device

    def prepare(self, lens: Sequence[int]) -> None:
        self._inner.prepare(np.array(lens, np.int32), self._device)

    def forward(self, qkv: Tensor) -> Tensor:
        return self._inner.forward(qkv)


class TorchTowerBackend:
    """The `TowerBackend` in torch: every part is called when it is run."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.ops = PlainEncoderOps(dtype, device)
        self.device = device
        self.dtype = dtype

    def make_attention(self, num_heads: int, head_dim: int) -> TorchTowerAttention:
        return TorchTowerAttention(num_heads, self.device)

    def run(self, part: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        return part(*(one.to(self.dtype) for one in rows))

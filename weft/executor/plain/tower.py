"""Computes towers (encoders of media) in torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.executor.plain.encoder_attention import TorchBidirectional
from weft.models.layers.encoder import EncoderHeads
from weft.models.vision.tower import Pieces, PlaneRotation, TowerHeads
from weft.ops.elementwise import apply_rotary, in_halves, rms_norm, rotary_tables
from weft.ops.encoder import PlainEncoderOps


class TorchTowerAttention:
    """The `TowerAttention` in torch."""

    def __init__(
        self, num_heads: int, device: torch.device, rotation: PlaneRotation | None
    ) -> None:
        self._inner = TorchBidirectional(num_heads)
        self._num_heads = num_heads
        self._device = device
        self._rotation = rotation
        self._angles: tuple[Tensor, Tensor] | None = None  # of the rows, for `apply_rotary`

    def prepare(self, lens: Sequence[int], places: IntArray | None = None) -> None:
        self._inner.prepare(np.array(lens, np.int32), self._device)
        if self._rotation is None or places is None:
            return
        by_pair = torch.from_numpy(places)[self._rotation.axes].T.long()
        cos = self._rotation.cos.gather(0, by_pair)
        sin = self._rotation.sin.gather(0, by_pair)
        cos, sin = rotary_tables(cos, sin, torch.float32)
        self._angles = (cos.to(self._device), sin.to(self._device))

    def forward(
        self,
        qkv: Tensor,
        heads: TowerHeads | None = None,
    ) -> Tensor:
        if self._angles is None and heads is None:
            return self._inner.forward(qkv)
        q, k, v = qkv.view(len(qkv), 3, self._num_heads, -1).unbind(1)
        scale = 0.0
        if heads is not None:
            q = rms_norm(q, *heads.q_norm)
            k = rms_norm(k, *heads.k_norm)
            v = rms_norm(v, *heads.v_norm)
            scale = heads.scale
        if self._rotation is not None and self._rotation.side_by_side:
            q = in_halves(q, q.shape[-1])
            k = in_halves(k, k.shape[-1])
        if self._angles is not None:
            q = apply_rotary(q.float(), *self._angles).to(qkv.dtype)
            k = apply_rotary(k.float(), *self._angles).to(qkv.dtype)
        qkv = torch.stack((q, k, v), dim=1).flatten(1)
        return self._inner.forward(qkv, EncoderHeads(scale=scale))


class TorchTowerBackend:
    """The `TowerBackend` in torch. It computes a part each time the part is run; it records no
    programs."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.ops = PlainEncoderOps(dtype, device)
        self.device = device
        self.dtype = dtype

    def make_attention(
        self, num_heads: int, head_dim: int, rotation: PlaneRotation | None = None
    ) -> TorchTowerAttention:
        return TorchTowerAttention(num_heads, self.device, rotation)

    def pause(self, x: Tensor, do: Callable[[Tensor], None]) -> None:
        do(x)

    def run(self, part: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        return part(*(one.to(self.dtype) for one in rows))

    def run_in_pieces(self, part: Callable[..., Tensor], *rows: Tensor) -> Pieces:
        yield
        return self.run(part, *rows)

"""The tensors that hold K and V. Which slot belongs to whom is decided elsewhere (`memory/`), in
numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weft.config.model import ModelConfig


class KVPool:
    """K and V of `num_slots` tokens for every layer, [slots, kv_heads, head_dim]; in int8 with a
    scale for each slot and head, in fp8 divided by `layer_scales`, of K and of V (1 if not
    given)."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        layer_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        num_layers = config.num_layers
        self.layer_scales = list(layer_scales or [(1.0, 1.0)] * num_layers)
        shape = (num_slots, config.num_kv_heads, config.head_dim)
        self.k = _layers(num_layers, shape, dtype, device)
        self.v = _layers(num_layers, shape, dtype, device)
        # Only int8 has a scale for each slot and head; the scales of fp8 are of whole layers.
        num_scaled = 0
        if dtype == torch.int8:
            num_scaled = num_layers
        self.k_scale = _layers(num_scaled, shape[:2], torch.float32, device)
        self.v_scale = _layers(num_scaled, shape[:2], torch.float32, device)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, *self.k_scale, *self.v_scale]

    @property
    def num_slots(self) -> int:
        return len(self.k[0])


def _layers(
    num_layers: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """A tensor of zeros for each layer."""
    return [zeros(shape, dtype, device) for _ in range(num_layers)]


def zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Zeros that take no memory until they are written to: torch.zeros writes them, numpy asks the
    system for them."""
    if device.type != "cpu":
        return torch.zeros(
            shape,
            dtype=dtype,
            device=device,
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    return memory.view(dtype).view(shape)

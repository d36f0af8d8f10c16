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
        self.layer_scales = list(layer_scales or [(1.0, 1.0)] * config.num_layers)
        shape = (num_slots, config.num_kv_heads, config.head_dim)
        num_scaled = config.num_layers if dtype == torch.int8 else 0
        self.k = [zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.v = [zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.k_scale = [zeros(shape[:2], torch.float32, device) for _ in range(num_scaled)]
        self.v_scale = [zeros(shape[:2], torch.float32, device) for _ in range(num_scaled)]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, *self.k_scale, *self.v_scale]

    @property
    def num_slots(self) -> int:
        return len(self.k[0])


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

"""The tensors that hold K and V. Which slot belongs to whom is decided elsewhere (`memory/`), in numpy."""

from __future__ import annotations

import torch

from weft.config.model import ModelConfig


class KVPool:
    """K and V of `num_slots` tokens for every layer."""

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device) -> None:
        shape = (num_slots, config.num_kv_heads, config.head_dim)
        dtype = getattr(torch, config.dtype)
        # Zeros, not empty: a page that nobody has written yet takes no memory, and holds no NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @property
    def num_slots(self) -> int:
        return len(self.k[0])

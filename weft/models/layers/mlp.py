"""The gated feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Empty, Weights
from weft.ops.elementwise import silu_and_mul


class GatedMLP:
    def __init__(self, config: ModelConfig, empty: Empty) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias, empty)
        self.down = Linear(inner, {"down_proj": hidden}, config.mlp_bias, empty)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]"""
        return self.down(silu_and_mul(self.gate_up(x)))

    def weights(self, prefix: str) -> Weights:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)

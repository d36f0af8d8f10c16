"""The gated feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import GatedLinear, Linear
from weft.models.layers.norm import norm_weights, rms_norm
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class GatedMLP:
    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm = rms_norm(hidden, config.norm_eps, ops)
        self.gate_up = GatedLinear(hidden, "gate_proj", "up_proj", inner, config.mlp_bias, ops)
        self.down = Linear(inner, {"down_proj": hidden}, config.mlp_bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """x + MLP(norm(x)): [T, hidden] -> [T, hidden]"""
        return self.down(self.gate_up(x, norm=self.norm), add=x)

    def weights(self, prefix: str) -> Weights:
        yield from norm_weights(self.norm, f"{prefix}.post_attention_layernorm")
        yield from self.gate_up.weights(f"{prefix}.mlp")
        yield from self.down.weights(f"{prefix}.mlp")

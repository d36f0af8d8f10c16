"""The gated feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.linear import GatedLinear, Linear
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class GatedMLP:
    """down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.gate_up = GatedLinear(
            hidden,
            "gate_proj",
            "up_proj",
            inner,
            config.mlp_bias,
            ops,
        )
        self.down = Linear(
            inner,
            {"down_proj": hidden},
            config.mlp_bias,
            ops,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(self.gate_up(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)

"""The feed-forward part of a layer, with a gate or without."""

from __future__ import annotations

from torch import Tensor

from weft.config.decoder import MlpSpec
from weft.config.model import ModelConfig
from weft.models.layers.linear import INPUTS, OUTPUTS, GatedLinear, Linear
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class GatedMLP:
    """down(activation(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(
        self,
        config: ModelConfig,
        spec: MlpSpec,
        ops: Ops,
        *,
        size: int = 0,
    ) -> None:
        """`size` is the size of the inner vector; 0: that of the spec, or of the model."""
        hidden = config.hidden_size
        inner = size or spec.size or config.intermediate_size
        names = config.decoder.names
        self.gate_up = GatedLinear(
            hidden,
            names.gate_up,
            inner,
            spec.bias,
            ops,
            activation=spec.activation,
        )
        self.down = Linear(
            inner,
            {names.down: hidden},
            spec.bias,
            ops,
            shard=INPUTS,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the last product reads: [T, hidden] -> [T, inner size]"""
        return self.gate_up(x)

    def weights(self, prefix: str) -> Weights:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)


class PlainMLP:
    """down(activation(up(x)))"""

    def __init__(
        self,
        config: ModelConfig,
        spec: MlpSpec,
        ops: Ops,
    ) -> None:
        hidden = config.hidden_size
        inner = spec.size or config.intermediate_size
        names = config.decoder.names
        self._ops = ops
        self._activation = spec.activation
        self.up = Linear(
            hidden,
            {names.gate_up[-1]: inner},
            spec.bias,
            ops,
            shard=OUTPUTS,
        )
        self.down = Linear(
            inner,
            {names.down: hidden},
            spec.bias,
            ops,
            shard=INPUTS,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the last product reads: [T, hidden] -> [T, inner size]"""
        return self._ops.activated(x, self.up.matrix, self._activation)

    def weights(self, prefix: str) -> Weights:
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)


def make_mlp(config: ModelConfig, spec: MlpSpec, ops: Ops) -> GatedMLP | PlainMLP:
    if spec.is_gated:
        return GatedMLP(config, spec, ops)
    return PlainMLP(config, spec, ops)

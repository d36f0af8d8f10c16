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


class CutMLP:
    """down(activation(max(0, gate - limit)) * up), where most gates are below their limit, which
    is `cut` standard deviations above the mean of a row."""

    def __init__(
        self,
        config: ModelConfig,
        spec: MlpSpec,
        ops: Ops,
        cut: float,
    ) -> None:
        hidden = config.hidden_size
        inner = spec.size or config.intermediate_size
        names = config.decoder.names
        gate, up = names.gate_up
        self._ops = ops
        self._activation = spec.activation
        self._cut = cut
        self.gate = Linear(hidden, {gate: inner}, spec.bias, ops)
        self.up = Linear(hidden, {up: inner}, spec.bias, ops)
        self.down = Linear(inner, {names.down: hidden}, spec.bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the last product reads: [T, hidden] -> [T, inner size]"""
        x = self._ops.computed(x)
        gate = self._ops.computed(self.gate(x))
        gate = self._ops.streams.cut_off(gate, self._cut, self._activation)
        return self._ops.multiply(gate, self._ops.computed(self.up(x)))

    def weights(self, prefix: str) -> Weights:
        yield from self.gate.weights(prefix)
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)


def make_mlp(config: ModelConfig, spec: MlpSpec, ops: Ops) -> GatedMLP | PlainMLP | CutMLP:
    if spec.cut is not None:
        return CutMLP(config, spec, ops, spec.cut)
    if spec.is_gated:
        return GatedMLP(config, spec, ops)
    return PlainMLP(config, spec, ops)

"""A transformer layer over patches or frames, common to all towers, with two kinds of feed-forward
part. Families name its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from weft.models.layers.linear import GatedLinear, Linear
from weft.models.layers.norm import CenteredNorm, RmsNorm
from weft.models.layers.weight import Weights
from weft.models.vision.tower import TowerAttention
from weft.ops.encoder import EncoderOps
from weft.ops.protocol import Norm

TowerNorm: TypeAlias = RmsNorm | CenteredNorm

QKV = ("q_proj", "k_proj", "v_proj")


class LayerNames(NamedTuple):
    """The names of the parts of a layer in checkpoints, below the layer's own name."""

    attention_norm: str
    attention: str
    qkv: tuple[str, ...]  # queries, keys and values, in one tensor or in three
    out: str
    mlp_norm: str
    mlp: str  # "": its tensors are directly below the layer
    up: tuple[str, ...]  # (gate, up), or only up
    down: str


VIT = LayerNames(
    attention_norm="layer_norm1",
    attention="self_attn",
    qkv=QKV,
    out="out_proj",
    mlp_norm="layer_norm2",
    mlp="mlp",
    up=("fc1",),
    down="fc2",
)


class LayerShape(NamedTuple):
    hidden_size: int
    inner_size: int
    activation: str
    has_bias: bool


class TowerLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        shape: LayerShape,
        names: LayerNames,
        norms: tuple[TowerNorm, TowerNorm],
        ops: EncoderOps,
        attention: TowerAttention,
    ) -> None:
        """`norms`: before attention, and before the feed-forward part. All layers of the tower
        share `attention`."""
        hidden = shape.hidden_size
        size = 3 * hidden // len(names.qkv)
        self._names = names
        self._ops = ops
        self._attention = attention
        self.attention_norm, self.mlp_norm = norms
        self.qkv = Linear(hidden, dict.fromkeys(names.qkv, size), shape.has_bias, ops)
        self.out = Linear(hidden, {names.out: hidden}, shape.has_bias, ops)
        self.mlp: TwoProducts | GatedProducts
        if len(names.up) == 2:
            self.mlp = GatedProducts(shape, names.up, names.down, ops)
        else:
            sizes = (hidden, shape.inner_size, hidden)
            self.mlp = TwoProducts(sizes, names.up, names.down, shape.activation, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        qkv = self._ops.computed(self.qkv(self.attention_norm(x)))
        x = x + self.out(self._attention.forward(qkv))
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, prefix: str) -> Weights:
        names = self._names
        of_mlp = f"{prefix}.{names.mlp}" if names.mlp else prefix
        yield from self.attention_norm.weights(f"{prefix}.{names.attention_norm}")
        yield from self.qkv.weights(f"{prefix}.{names.attention}")
        yield from self.out.weights(f"{prefix}.{names.attention}")
        yield from self.mlp_norm.weights(f"{prefix}.{names.mlp_norm}")
        yield from self.mlp.weights(of_mlp)


class TwoProducts:
    """down(activation(up(x)))"""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        up: Sequence[str],
        down: str,
        activation: str,
        ops: EncoderOps,
        *,
        has_bias: bool = True,
    ) -> None:
        """`sizes` of the input, the inner vector and the output; `up` is one name."""
        in_size, inner_size, out_size = sizes
        (name,) = up
        self._ops = ops
        self._activation = activation
        self.up = Linear(in_size, {name: inner_size}, has_bias, ops)
        self.down = Linear(inner_size, {down: out_size}, has_bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._ops.activated(x, self.up.matrix, self._activation))

    def weights(self, prefix: str) -> Weights:
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)


class GatedProducts:
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self, shape: LayerShape, gate_up: tuple[str, ...], down: str, ops: EncoderOps
    ) -> None:
        self.gate_up = GatedLinear(
            shape.hidden_size,
            gate_up,
            shape.inner_size,
            shape.has_bias,
            ops,
            activation=shape.activation,
        )
        self.down = Linear(shape.inner_size, {down: shape.hidden_size}, shape.has_bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)


def plain_norm(
    size: int,
    eps: float,
    ops: EncoderOps,
) -> Norm:
    """A norm without a weight: kernels always read one."""
    weight = ops.vector(size, exact=True)
    weight.fill_(1)
    return Norm(weight, eps)

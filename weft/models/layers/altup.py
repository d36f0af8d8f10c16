"""Layers of a decoder with several versions of each token's hidden state, the streams. A layer
predicts all of them from those before it, computes one, and corrects all by what that one became;
a product of low rank stands beside attention (`AltUpSpec`)."""

from __future__ import annotations

import math

from torch import Tensor

from weft.config.decoder import AltUpSpec, MlpSpec
from weft.config.model import ModelConfig
from weft.models.layers.attention import Attention, PagedAttention
from weft.models.layers.layer_inputs import LayerInputGate
from weft.models.layers.linear import Linear
from weft.models.layers.mlp import make_mlp
from weft.models.layers.norm import RmsNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Stack, Weight, Weights, vector
from weft.ops.protocol import Matrix, Norm, Ops, StreamRouter

OPENING = "altup_projections"
CLOSING = "altup_unembed_projections"
LOW_RANK_NORM = "laurel.post_laurel_norm"
HALF = math.sqrt(0.5)  # factor of the sum of attention and of the product beside it


class AltUp:
    """The streams before the first layer, of the embeddings, and the one after the last."""

    def __init__(self, config: ModelConfig, spec: AltUpSpec, ops: Ops) -> None:
        hidden = config.hidden_size
        self._ops = ops
        self._size = hidden
        self._num_others = spec.num - 1
        others = range(self._num_others)
        self._opening = Linear(
            hidden, {f"{OPENING}.{other}": hidden for other in others}, False, ops
        )
        self._closing = [
            Linear(hidden, {f"{CLOSING}.{other}": hidden}, False, ops) for other in others
        ]

    def open(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, num hidden]"""
        x = self._ops.computed(x)
        return self._ops.streams.open(x, self._ops.computed(self._opening(x)))

    def close(self, x: Tensor) -> Tensor:
        """[T, num hidden] -> [T, hidden]"""
        first, *streams = x.chunk(1 + self._num_others, dim=1)
        others = self._ops.space(x, self._num_others * self._size)
        outs = others.chunk(self._num_others, dim=1)
        for product, stream, out in zip(self._closing, streams, outs, strict=True):
            self._ops.linear_into(stream, product.matrix, out)
        return self._ops.streams.close(first, others)

    def weights(self) -> Weights:
        for index, weight in enumerate(self._opening.weights("model")):
            yield self._stacked(weight, OPENING, index)
        for index, product in enumerate(self._closing):
            for weight in product.weights("model"):
                yield self._stacked(weight, CLOSING, index)

    def _stacked(self, weight: Weight, name: str, index: int) -> Weight:
        """Files of GGUF have all matrices of a kind in one tensor."""
        shape = (self._num_others, self._size, self._size)
        return weight._replace(stacks=(Stack(f"model.{name}.weight", shape, index),))


class AltUpLayer:
    """A layer of such a decoder."""

    def __init__(
        self,
        config: ModelConfig,
        spec: AltUpSpec,
        layer: int,
        rope: Rope | None,
        ops: Ops,
    ) -> None:
        hidden = config.hidden_size
        of_layer = config.decoder.layer(layer)
        names = config.decoder.names
        assert isinstance(of_layer.mlp, MlpSpec)
        assert config.decoder.layer_inputs is not None
        self._ops = ops
        self._names = names
        self._active = spec.active
        self._size = hidden
        self.factors = StreamFactors(config, spec, ops)
        self.norms = {
            name: RmsNorm(hidden, config.norm_eps, ops)
            for name in (
                names.attention_norm,
                names.attention_post_norm,
                names.mlp_norm,
                names.mlp_post_norm,
                LOW_RANK_NORM,
            )
        }
        self.attention = Attention(config, layer, rope, ops)
        self.left = Linear(hidden, {"linear_left": spec.rank}, False, ops)
        self.right = Linear(spec.rank, {"linear_right": hidden}, False, ops)
        self.mlp = make_mlp(config, of_layer.mlp, ops)
        self.input_gate = LayerInputGate(config, config.decoder.layer_inputs, ops)
        self._half = ops.vector(1, exact=True)
        self._half.fill_(HALF)
        # Before the gate of the layer's inputs.
        self.scale = ops.vector(hidden, exact=True)
        self._scales = spec.scales_output
        self.narrows = layer == config.last_storing_layer

    def __call__(
        self,
        x: Tensor,
        attention: PagedAttention,
        layer_input: Tensor | None = None,
    ) -> Tensor:
        """[T, num hidden] -> [T, num hidden], or fewer rows (`PagedAttention.narrow`)."""
        ops = self._ops
        names = self._names
        assert layer_input is not None
        before = self.norms[names.attention_norm]
        streams = self.factors.predict(x)
        mixed = self.attention(before(self._one_of(streams)), attention)
        if self.narrows:
            streams = ops.computed(attention.narrow(streams))
            layer_input = ops.computed(attention.narrow(layer_input))
        one = self._one_of(streams)
        low_rank = self.right(self.left(before(one)))
        y = self._copied(one)
        y = y + self.norms[names.attention_post_norm](mixed)
        y = y + self.norms[LOW_RANK_NORM](low_rank)
        y = y + before(one)
        y = ops.multiply(y, self._half)
        fed = self.mlp(self.norms[names.mlp_norm](y))
        y = ops.computed(y + self.norms[names.mlp_post_norm](fed))
        self.factors.correct(streams, y)
        one = self._copied(self._one_of(streams))
        if self._scales:
            one = ops.computed(ops.multiply(one, self.scale))
        added = ops.computed(self.input_gate.product(one, layer_input))
        ops.streams.add_normed(streams, added, self.input_gate.norm.norm)
        return streams

    def _one_of(self, streams: Tensor) -> Tensor:
        """The stream that the layer computes, a view."""
        first = self._active * self._size
        return streams[:, first : first + self._size]

    def _copied(self, x: Tensor) -> Tensor:
        out = self._ops.space(x, self._size)
        self._ops.copy(x[:, None], out[:, None])
        return out

    def weights(self, prefix: str) -> Weights:
        names = self._names
        for name, norm in self.norms.items():
            yield from norm.weights(f"{prefix}.{name}")
        yield from self.attention.weights(f"{prefix}.{names.attention}")
        yield from self.mlp.weights(f"{prefix}.{names.mlp}")
        yield from self.left.weights(f"{prefix}.laurel")
        yield from self.right.weights(f"{prefix}.laurel")
        yield from self.factors.weights(f"{prefix}.altup")
        yield vector(f"{prefix}.altup.correct_output_scale", self.scale)
        yield from self.input_gate.weights(prefix)


class StreamFactors:
    """How a layer predicts and corrects streams: by factors that follow from one of them."""

    def __init__(self, config: ModelConfig, spec: AltUpSpec, ops: Ops) -> None:
        hidden = config.hidden_size
        self._ops = ops
        self._hidden = hidden
        self._active = spec.active
        num = spec.num
        self._num = num
        norm = Norm(ops.vector(hidden, exact=True), config.norm_eps)
        self._router = StreamRouter(norm, ops.exact_matrix(hidden, num))
        self._predicting = ops.exact_matrix(num, num * num)
        self._correcting = ops.exact_matrix(num, num)

    def predict(self, x: Tensor) -> Tensor:
        """[T, num hidden] -> [T, num hidden]"""
        first = self._active * self._hidden
        one = x[:, first : first + self._hidden]
        streams = self._ops.streams
        return streams.predict(x, streams.factors(one, self._router, self._predicting))

    def correct(self, x: Tensor, y: Tensor) -> None:
        """x [T, num hidden], overwritten; y [T, hidden]: what one of its streams became."""
        streams = self._ops.streams
        factors = streams.factors(y, self._router, self._correcting)
        streams.correct(x, y, factors, self._active)

    def weights(self, prefix: str) -> Weights:
        # The router's input is divided by its size after the norm.
        norm = self._router.norm.weight
        yield vector(f"{prefix}.router_norm.weight", norm, times=1 / self._hidden)
        num = self._num
        yield _exact(f"{prefix}.modality_router.weight", (num, self._hidden), self._router.weight)
        yield _exact(f"{prefix}.prediction_coefs.weight", (num * num, num), self._predicting)
        yield _exact(f"{prefix}.correction_coefs.weight", (num, num), self._correcting)


def _exact(name: str, shape: tuple[int, int], matrix: Matrix) -> Weight:
    def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        matrix.put(0, content, start, scales)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get(0, start, stop)

    return Weight(name, shape, put, get)

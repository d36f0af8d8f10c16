"""The parts of encoders: embeddings with positions and segments, attention over the whole prompt,
the feed-forward part, and their norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.config.encoder_spec import DisentangledSpec, EncoderSpec
from weft.config.model import ModelConfig
from weft.models.layers.distances import Biases, DistanceVectors
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import GatedLinear, HeadwiseLinear, Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps, Tables


class EncoderHeads(NamedTuple):
    """The work on queries, keys and scores between the projections and the softmax."""

    scale: float = 0.0  # factor of scores; 0: 1 / sqrt(D)
    rope: Rope | None = None  # None: queries and keys are not rotated
    window: int = 0  # a token sees the window - 1 tokens on either side of it; 0: all
    biases: Biases | None = None  # added to scores, by distance
    distances: DistanceVectors | None = None  # added to products; in torch alone

    def score_scale(self, head_dim: int) -> float:
        return self.scale or 1 / math.sqrt(head_dim)


PLAIN_HEADS = EncoderHeads()


class BidirectionalAttention(Protocol):
    """Attention within the prompts of this step. Each prompt is in the step as a whole."""

    def forward(
        self,
        qkv: Tensor,
        heads: EncoderHeads = PLAIN_HEADS,
    ) -> Tensor:
        """qkv [T, 3 heads D] (may be overwritten) -> [T, heads D]. Every token attends to all
        tokens of its prompt, or to those in its window."""
        ...


def encoder_spec(config: ModelConfig) -> EncoderSpec:
    assert config.encoder is not None, "this model is no encoder"
    return config.encoder


def encoder_norm(
    config: ModelConfig,
    ops: EncoderOps,
    size: int = 0,
) -> CenteredNorm:
    """A norm of vectors of the hidden size, or of `size`."""
    return CenteredNorm(
        size or config.hidden_size,
        config.norm_eps,
        ops,
        has_bias=encoder_spec(config).norm_bias,
    )


class Embeddings:
    """norm(token + position + segment type), of which a model may lack all but tokens; then
    projected, if embeddings have another size."""

    def __init__(
        self,
        config: ModelConfig,
        ops: EncoderOps,
    ) -> None:
        spec = encoder_spec(config)
        self._names = spec.names
        self._ops = ops
        size = spec.embedding_size or config.hidden_size
        norm_size = size
        if spec.projection_norms:
            norm_size = config.hidden_size

        def table(num_rows: int) -> Embedding | None:
            return Embedding(num_rows, size, ops) if num_rows else None

        self.words = Embedding(config.vocab_size, size, ops)
        self.positions = table(spec.num_positions)
        self.types = table(spec.num_token_types)
        self.norm: CenteredNorm | None = None
        if spec.names.embedded_norm:
            self.norm = encoder_norm(config, ops, norm_size)
        self.projected: Linear | None = None
        self._norms_after = spec.projection_norms
        if spec.names.projected:
            parts = {spec.names.projected: config.hidden_size}
            self.projected = Linear(size, parts, spec.projection_bias, ops)
        self._tables = Tables(
            words=self.words.matrix,
            kinds=None if self.types is None else self.types.matrix,
            positions=None if self.positions is None else self.positions.matrix,
            first_position=spec.first_position,
        )

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
    ) -> Tensor:
        """Each [T] -> [T, hidden]"""
        norm = None if self.norm is None else self.norm.norm
        first_norm = None if self._norms_after else norm
        x = self._ops.embed_sum(tokens, positions, types, self._tables, first_norm)
        if self.projected is not None:
            x = self._ops.computed(self.projected(x))
        if self._norms_after and self.norm is not None:
            x = self.norm(x)
        return x

    def weights(self, base: str) -> Weights:
        names = self._names
        yield from self.words.weights(f"{base}.{names.words}")
        if self.positions is not None:
            yield from self.positions.weights(f"{base}.{names.positions}")
        if self.types is not None:
            yield from self.types.weights(f"{base}.{names.types}")
        if self.norm is not None:
            yield from self.norm.weights(f"{base}.{names.embedded_norm}")
        if self.projected is not None:
            yield from self.projected.weights(base)


class EncoderLayer:
    """Attention and then the feed-forward part, each as norm(x + f(x)) or as x + f(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ropes: Mapping[object, Rope],
        biases: Biases | None,
        ops: EncoderOps,
    ) -> None:
        spec = encoder_spec(config)
        layer = spec.layer(index)
        hidden = config.hidden_size
        self._ops = ops
        self._spec = spec
        self._disentangled = spec.disentangled
        self.qkv = _qkv(config, spec, ops)
        self.out = Linear(hidden, {spec.names.out: hidden}, spec.out_bias, ops)
        self.mlp = _EncoderMlp(config, spec, ops)
        self.attention_norm: CenteredNorm | None = None
        if index or not spec.skips_first_norm:
            self.attention_norm = encoder_norm(config, ops)
        self.mlp_norm = encoder_norm(config, ops)
        self.of_distances: Linear | None = None
        num_terms = 1
        if spec.disentangled is not None:
            self.of_distances = _distance_projections(spec.disentangled, hidden, ops)
            num_terms = spec.disentangled.num_terms
        self._heads = EncoderHeads(
            scale=1 / math.sqrt(config.head_dim * num_terms),
            rope=None if layer.rope is None else ropes[layer.rope],
            window=layer.window,
            biases=biases,
        )

    def __call__(
        self, x: Tensor, attention: BidirectionalAttention, distances: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]. `distances` [2 * span, hidden]: vectors of distances, for
        models that have them."""
        # The kernels expect the sums in this form: a product adds its output to x itself.
        if self._spec.norms_first:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self._attend(normed, attention, distances)
            return x + self.mlp(self.mlp_norm(x))
        assert self.attention_norm is not None
        x = self.attention_norm(x + self._attend(x, attention, distances))
        return self.mlp_norm(x + self.mlp(x))

    def _attend(
        self, x: Tensor, attention: BidirectionalAttention, distances: Tensor | None
    ) -> Tensor:
        qkv = self._ops.computed(self.qkv(x))
        heads = self._heads
        if self._disentangled is not None and distances is not None:
            vectors = self._vectors(self._disentangled, distances)
            heads = heads._replace(distances=vectors)
        return self.out(attention.forward(qkv, heads))

    def _vectors(
        self,
        spec: DisentangledSpec,
        distances: Tensor,
    ) -> DistanceVectors:
        """The keys and queries of distances."""
        if self.of_distances is None:
            queries, keys, _ = self._ops.computed(self.qkv(distances)).chunk(3, 1)
            return DistanceVectors(
                spec, keys if spec.by_key else None, queries if spec.by_query else None
            )
        made = self._ops.computed(self.of_distances(distances))
        parts = list(made.chunk(made.shape[1] // distances.shape[1], 1))
        of_keys = parts.pop(0) if spec.by_key else None
        return DistanceVectors(spec, of_keys, parts.pop(0) if spec.by_query else None)

    def weights(self, prefix: str) -> Weights:
        names = self._spec.names
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)
        if self.attention_norm is not None:
            yield from self.attention_norm.weights(f"{prefix}.{names.attention_norm}")
        yield from self.mlp.weights(prefix)
        yield from self.mlp_norm.weights(f"{prefix}.{names.mlp_norm}")
        if self.of_distances is not None:
            yield from self.of_distances.weights(prefix)


class _EncoderMlp:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        config: ModelConfig,
        spec: EncoderSpec,
        ops: EncoderOps,
    ) -> None:
        hidden = config.hidden_size
        inner = config.intermediate_size
        names = spec.names
        bias = spec.mlp_bias
        self._ops = ops
        self._activation = spec.activation
        self.up: GatedLinear | Linear
        if spec.is_gated:
            self.up = GatedLinear(hidden, names.up, inner, bias, ops, activation=spec.activation)
        else:
            self.up = Linear(hidden, {names.up[0]: inner}, bias, ops)
        self.down = Linear(inner, {names.down: hidden}, bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        if isinstance(self.up, GatedLinear):
            return self.down(self.up(x))
        return self.down(self._ops.activated(x, self.up.matrix, self._activation))

    def weights(self, prefix: str) -> Weights:
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)


def _qkv(
    config: ModelConfig,
    spec: EncoderSpec,
    ops: EncoderOps,
) -> Linear:
    hidden = config.hidden_size
    names = spec.names.qkv
    if len(names) > 1:
        return Linear(hidden, dict.fromkeys(names, hidden), spec.qkv_bias, ops)
    return HeadwiseLinear(hidden, names[0], (hidden,) * 3, 1, spec.qkv_bias, ops)


def _distance_projections(
    spec: DisentangledSpec,
    hidden: int,
    ops: EncoderOps,
) -> Linear | None:
    """To keys and queries of distances; None: by the projections of tokens."""
    named = zip(spec.projections, (spec.by_key, spec.by_query), strict=True)
    names = [name for name, is_there in named if name and is_there]
    if not names:
        return None
    return Linear(hidden, dict.fromkeys(names, hidden), True, ops)


class DistanceTable:
    """The vectors of distances that all layers share."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DisentangledSpec,
        ops: EncoderOps,
    ) -> None:
        self._names = spec
        self._ops = ops
        self.table = Embedding(2 * spec.span, config.hidden_size, ops)
        self.norm = encoder_norm(config, ops) if spec.norm else None
        self._rows = torch.arange(2 * spec.span)

    def __call__(self, device: torch.device) -> Tensor:
        """[2 * span, hidden]"""
        vectors = self.table(self._rows.to(device))
        return vectors if self.norm is None else self.norm(vectors)

    def weights(self, base: str) -> Weights:
        yield from self.table.weights(f"{base}.{self._names.name}")
        if self.norm is not None:
            yield from self.norm.weights(f"{base}.{self._names.norm}")

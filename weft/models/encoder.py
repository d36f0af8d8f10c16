"""Encoders of texts, whose tokens attend to the full prompt, or to a window on both sides: BERT,
and families that are described like it (`config/encoder_spec.py`)."""

from __future__ import annotations

from torch import Tensor

from weft.config.encoder_spec import ClassifierSpec, VocabularySpec
from weft.config.model import ModelConfig
from weft.models.layers.distances import BucketBiases
from weft.models.layers.embedding import Embedding, matrix_weight
from weft.models.layers.encoder import (
    BidirectionalAttention,
    DistanceTable,
    Embeddings,
    EncoderLayer,
    encoder_norm,
    encoder_spec,
)
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weight, Weights
from weft.ops.encoder import EncoderOps


class ClassifierHead:
    """out(norm(activation(dense(x)))); some have no norm."""

    def __init__(
        self,
        config: ModelConfig,
        spec: ClassifierSpec,
        ops: EncoderOps,
    ) -> None:
        assert config.pooling is not None
        self._spec = spec
        self._ops = ops
        hidden = config.hidden_size
        self.dense = Linear(hidden, {_leaf(spec.dense): hidden}, spec.dense_bias, ops)
        self.norm = encoder_norm(config, ops) if spec.norm else None
        self.out = Linear(hidden, {_leaf(spec.out): len(config.pooling.labels)}, True, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, labels], float32"""
        inner = self._ops.activated(x, self.dense.matrix, self._spec.activation)
        if self.norm is not None:
            inner = self.norm(inner)
        return self._ops.computed(self.out(inner)).float()

    def weights(self) -> Weights:
        yield from _named(self.dense, self._spec.dense)
        if self.norm is not None:
            yield from self.norm.weights(self._spec.norm)
        yield from _named(self.out, self._spec.out)


class VocabularyHead:
    """log(1 + relu(out(norm(activation(dense(x)))))), for sparse vectors.
    Source: arXiv:2109.10086, 3.1."""

    def __init__(
        self, config: ModelConfig, spec: VocabularySpec, words: Embedding, ops: EncoderOps
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._words = words if config.tie_embeddings else None
        hidden = config.hidden_size
        self.dense = Linear(hidden, {_leaf(spec.dense): hidden}, spec.dense_bias, ops)
        self.norm: CenteredNorm = encoder_norm(config, ops)
        # The embedding is stored as rows, for which there is no product.
        self.out = Linear(hidden, {_leaf(spec.out): config.vocab_size}, bool(spec.bias), ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], float32"""
        inner = self.norm(self._ops.activated(x, self.dense.matrix, self._spec.activation))
        return self._ops.computed(self.out(inner)).float()

    def weights(self) -> Weights:
        """Without the matrix, if it is that of the embedding (`tied`)."""
        spec = self._spec
        yield from _named(self.dense, spec.dense)
        yield from self.norm.weights(spec.norm)
        for weight in _named(self.out, spec.out):
            if weight.name.endswith(".bias"):
                # A head with its own matrix has its own bias.
                yield weight if self._words is None else weight._replace(name=spec.bias)
            elif self._words is None:
                yield weight

    def tied(self, embedded: Weight) -> Weight:
        """The weight of the embedding, which fills the matrix here, too, if they are the same."""
        if self._words is None:
            return embedded
        mine = matrix_weight("", self._words.shape, self.out.matrix)

        def put(
            content: Tensor,
            start: int = 0,
            scales: Tensor | None = None,
        ) -> None:
            embedded.put(content, start, scales)
            mine.put(content, start, scales)

        return embedded._replace(put=put, keep_as=None, put_codes=None)


class TokenProjection:
    """The linear of a checkpoint with a vector for each token. Source: arXiv:2004.12832, 3.2."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        ops: EncoderOps,
    ) -> None:
        self._ops = ops
        self.linear = Linear(config.hidden_size, {"linear": size}, False, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, size], float32"""
        return self._ops.computed(self.linear(x)).float()

    def weights(self) -> Weights:
        yield from _named(self.linear, "linear")


class Encoder:
    def __init__(
        self,
        config: ModelConfig,
        ops: EncoderOps,
    ) -> None:
        spec = encoder_spec(config)
        self._ops = ops
        self._spec = spec
        reach = config.context_length or config.max_position
        self.embeddings = Embeddings(config, ops)
        self.buckets: BucketBiases | None = None
        if spec.buckets is not None:
            self.buckets = BucketBiases(spec.buckets, config.num_heads, reach, ops)
        self.distances: DistanceTable | None = None
        if spec.disentangled is not None:
            self.distances = DistanceTable(config, spec.disentangled, ops)
        # Layers that rotate alike share a rotation, so that its tables are made once.
        rotations = {layer.rope for layer in spec.layers if layer.rope is not None}
        ropes: dict[object, Rope] = {rope: Rope(rope, config) for rope in rotations}
        biases = None if self.buckets is None else self.buckets.biases
        self.layers = [
            EncoderLayer(config, index, ropes, biases, ops) for index in range(config.num_layers)
        ]
        self.final_norm: CenteredNorm | None = None
        if spec.names.final_norm:
            self.final_norm = encoder_norm(config, ops)
        self.head = _head(config, self.embeddings.words, ops)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: BidirectionalAttention,
    ) -> Tensor:
        x = self.embeddings(tokens, positions, types)
        distances: Tensor | None = None
        if self.distances is not None:
            distances = self.distances(tokens.device)
        for layer in self.layers:
            x = layer(x, attention, distances)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self._ops.computed(x)

    def normed(self, hidden: Tensor) -> Tensor:
        """Only widens: `forward` already ends with a norm."""
        return hidden.float()

    def logits(
        self,
        hidden: Tensor,
        places: Tensor | None = None,
    ) -> Tensor:
        if places is not None:
            hidden = hidden[places]
        assert self.head is not None, "this model has no head"
        return self.head(hidden)

    def weights(self) -> Weights:
        base = self._spec.base
        words = f"{base}.{self._spec.names.words}.weight"
        for weight in self.embeddings.weights(base):
            if weight.name == words and isinstance(self.head, VocabularyHead):
                yield self.head.tied(weight)
            else:
                yield weight
        if self.buckets is not None and self._spec.buckets is not None:
            yield self.buckets.weight(f"{base}.{self._spec.buckets.name}")
        if self.distances is not None:
            yield from self.distances.weights(base)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{base}.{self._spec.names.layers}.{index}")
        if self.final_norm is not None:
            yield from self.final_norm.weights(f"{base}.{self._spec.names.final_norm}")
        if self.head is not None:
            yield from self.head.weights()


Head = ClassifierHead | VocabularyHead | TokenProjection


def _head(
    config: ModelConfig,
    words: Embedding,
    ops: EncoderOps,
) -> Head | None:
    """What makes the outputs of hidden states, if they are not vectors themselves."""
    spec = encoder_spec(config)
    pooling = config.pooling
    if pooling is None:
        return None
    if pooling.kind == "tokens":
        return TokenProjection(config, pooling.size, ops)
    if pooling.kind == "sparse":
        assert spec.vocabulary is not None, "this family has no head for its vocabulary"
        return VocabularyHead(config, spec.vocabulary, words, ops)
    if pooling.labels:
        assert spec.classifier is not None, "this family has no classifiers"
        return ClassifierHead(config, spec.classifier, ops)
    return None


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _named(projection: Linear, name: str) -> Weights:
    """The weights of a projection, by its full name in checkpoints."""
    # `Linear.weights` writes a dot between prefix and name, and the prefix may be empty here.
    for weight in projection.weights(name.rpartition(".")[0]):
        yield weight._replace(name=weight.name.lstrip("."))

"""BERT and its relatives: encoders, whose tokens see the whole prompt. RoBERTa and XLM-RoBERTa differ in where
positions begin and in the head that classifies."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.encoder import BidirectionalAttention, Embeddings, EncoderLayer
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps


class Naming(NamedTuple):
    """How checkpoints call the base model, and the two projections of the classifier: in which part, by which name."""

    base: str
    dense: tuple[str, str]
    classifier: tuple[str, str]


BERT = Naming("bert", ("bert.pooler", "dense"), ("", "classifier"))
ROBERTA = Naming("roberta", ("classifier", "dense"), ("classifier", "out_proj"))


class Bert:
    def __init__(self, config: ModelConfig, ops: EncoderOps, naming: Naming = BERT) -> None:
        self._ops, self._naming = ops, naming
        self.embeddings = Embeddings(config, ops)
        self.layers = [EncoderLayer(config, ops) for _ in range(config.num_layers)]
        labels = config.pooling.labels if config.pooling is not None else ()
        size = config.hidden_size
        self.dense = Linear(size, {naming.dense[1]: size}, True, ops) if labels else None
        self.classifier = (
            Linear(size, {naming.classifier[1]: len(labels)}, True, ops) if labels else None
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, types: Tensor, attention: BidirectionalAttention
    ) -> Tensor:
        x = self.embeddings(tokens, positions, types)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer ends with its norm."""
        return hidden.float()

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.dense is not None, "this model has no labels"
        assert self.classifier is not None
        return self.classifier(self._ops.activated(hidden, self.dense.matrix, "tanh")).float()

    def weights(self) -> Weights:
        naming = self._naming
        yield from self.embeddings.weights(f"{naming.base}.embeddings")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{naming.base}.encoder.layer.{index}")
        for projection, (part, _) in (
            (self.dense, naming.dense),
            (self.classifier, naming.classifier),
        ):
            if projection is not None:
                yield from (
                    weight._replace(name=weight.name.lstrip("."))
                    for weight in projection.weights(part)
                )


def roberta(config: ModelConfig, ops: EncoderOps) -> Bert:
    """The head that classifies stands outside of the base model here."""
    return Bert(config, ops, ROBERTA)

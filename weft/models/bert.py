"""BERT and its relatives: encoders, whose tokens attend to the whole prompt. RoBERTa and
XLM-RoBERTa differ in the first position and in the classification head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.encoder import BidirectionalAttention, Embeddings, EncoderLayer
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weights
from weft.ops.encoder import EncoderOps


class Naming(NamedTuple):
    """The names in checkpoints of the base model, and of the two projections of the classifier:
    each as (module, name in that module)."""

    base: str
    dense: tuple[str, str]
    classifier: tuple[str, str]


# In BERT's checkpoints, the first projection of the classifier is the pooler of the base model.
BERT = Naming("bert", ("bert.pooler", "dense"), ("", "classifier"))
ROBERTA = Naming("roberta", ("classifier", "dense"), ("classifier", "out_proj"))


class Classifier:
    """out(tanh(dense(x)))"""

    def __init__(
        self,
        config: ModelConfig,
        num_labels: int,
        ops: EncoderOps,
        naming: Naming,
    ):
        self._ops = ops
        self._naming = naming
        hidden = config.hidden_size
        self.dense = Linear(
            hidden,
            {naming.dense[1]: hidden},
            True,
            ops,
        )
        self.out = Linear(
            hidden,
            {naming.classifier[1]: num_labels},
            True,
            ops,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, labels], float32"""
        inner = self._ops.activated(x, self.dense.matrix, "tanh")
        return self._ops.computed(self.out(inner)).float()

    def weights(self) -> Weights:
        yield from _below(self._naming.dense[0], self.dense)
        yield from _below(self._naming.classifier[0], self.out)


class Bert:
    def __init__(
        self,
        config: ModelConfig,
        ops: EncoderOps,
        naming: Naming = BERT,
    ) -> None:
        self._ops = ops
        self._base = naming.base
        self.embeddings = Embeddings(config, ops)
        self.layers = [EncoderLayer(config, ops) for _ in range(config.num_layers)]
        self.classifier: Classifier | None = None
        if config.pooling is not None and config.pooling.labels:
            self.classifier = Classifier(
                config,
                len(config.pooling.labels),
                ops,
                naming,
            )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor,
        attention: BidirectionalAttention,
    ) -> Tensor:
        x = self.embeddings(tokens, positions, types)
        for layer in self.layers:
            x = layer(x, attention)
        return self._ops.computed(x)

    def normed(self, hidden: Tensor) -> Tensor:
        """Only widens: the last layer already ends with its norm."""
        return hidden.float()

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            hidden = hidden[places]
        assert self.classifier is not None, "this model has no labels"
        return self.classifier(hidden)

    def weights(self) -> Weights:
        yield from self.embeddings.weights(f"{self._base}.embeddings")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{self._base}.encoder.layer.{index}")
        if self.classifier is not None:
            yield from self.classifier.weights()


def roberta(config: ModelConfig, ops: EncoderOps) -> Bert:
    """The classification head is outside of the base model here."""
    return Bert(config, ops, ROBERTA)


def _below(part: str, projection: Linear) -> Weights:
    """The weights of a projection. If `part` is empty, their names begin without a dot."""
    # `Linear.weights` writes a dot between prefix and name, and the prefix may be empty here.
    for weight in projection.weights(part):
        yield weight._replace(name=weight.name.lstrip("."))

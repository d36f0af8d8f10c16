"""The head of a decoder: logits of tokens, or scores of labels. A model that only computes
embeddings has none; with tied weights the head uses the matrix of the token embedding."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.embedding import VOCABULARY, Embedding, matrix_weight
from weft.models.layers.linear import bias_weight
from weft.models.layers.weight import Weights
from weft.ops.protocol import Matrix, Ops


class LmHead:
    """scale (W x + b), capped. `name` is the name of W in checkpoints, "" if the embedding owns
    W."""

    def __init__(
        self,
        matrix: Matrix,
        shape: tuple[int, int],
        name: str,
        ops: Ops,
        *,
        scale: float = 1.0,
        cap: float = 0.0,
        has_bias: bool = False,
    ) -> None:
        self._ops = ops
        self._name = name
        self._has_bias = has_bias
        self._scale = scale
        self._cap = cap
        self.matrix = matrix
        self.shape = shape

    def __call__(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, vocab or labels], float32. x are the step's tokens at `places`."""
        return self.with_ops(self._ops, x, places)

    def with_ops(self, ops: Ops, x: Tensor, places: Tensor | None = None) -> Tensor:
        """The same, computed by the `ops` of another model with this matrix."""
        return ops.logits(
            x,
            self.matrix,
            self._scale,
            self._cap,
            places,
        )

    def weights(self) -> Weights:
        if self._name:
            yield matrix_weight(self._name, self.shape, self.matrix)
        if self._has_bias:
            yield bias_weight("lm_head.bias", self.matrix, 0)


def make_head(
    config: ModelConfig,
    embedding: Embedding,
    ops: Ops,
) -> LmHead | None:
    """The head of a decoder with this configuration."""
    spec = config.decoder
    if config.pooling is not None:
        # An embedding model: its checkpoint may have no matrix for the vocabulary.
        num_labels = len(config.pooling.labels)
        if not num_labels:
            return None
        return LmHead(
            ops.matrix(config.hidden_size, (num_labels,), precise=True),
            (num_labels, config.hidden_size),
            "score",
            ops,
        )
    # `precise`: logits decide between tokens, so this matrix keeps more bits than others.
    matrix = embedding.matrix
    if not config.tie_embeddings:
        matrix = ops.matrix(
            config.hidden_size,
            (config.vocab_size,),
            bias=spec.head_bias,
            precise=True,
            shard=VOCABULARY,
        )
    return LmHead(
        matrix,
        (config.vocab_size, config.hidden_size),
        "" if config.tie_embeddings else "lm_head",
        ops,
        scale=spec.logit_scale,
        cap=spec.logit_cap,
        has_bias=spec.head_bias,
    )

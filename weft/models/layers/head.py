"""What stands behind the last layer: the final norm, and logits of tokens or scores of labels. A model that only makes
vectors has neither; with tied weights the matrix of logits is that of the token embedding."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.embedding import Embedding, matrix_weight
from weft.models.layers.weight import Weights
from weft.ops.protocol import Matrix, Norm, Ops


class Head:
    """W norm(x). `name` is that of W in checkpoints, "" if it has a name elsewhere."""

    def __init__(self, matrix: Matrix, shape: tuple[int, int], name: str, ops: Ops) -> None:
        self._ops, self._name = ops, name
        self.matrix, self.shape = matrix, shape

    def __call__(self, hidden: Tensor, norm: Norm) -> Tensor:
        """hidden [S, hidden] -> [S, vocab or labels], float32"""
        return self._ops.logits(hidden, self.matrix, norm)

    def weights(self) -> Weights:
        if self._name:
            yield matrix_weight(self._name, self.shape, self.matrix)


def make_head(config: ModelConfig, embedding: Embedding, ops: Ops) -> Head | None:
    """The head that a decoder has."""
    if config.pooling is None and config.tie_embeddings:
        return Head(embedding.matrix, embedding.shape, "", ops)
    size, hidden_size = config.vocab_size, config.hidden_size
    if config.pooling is not None:
        size = len(config.pooling.labels)
    if not size:
        return None
    matrix = ops.matrix(hidden_size, (size,), precise=True)
    return Head(matrix, (size, hidden_size), "lm_head" if config.pooling is None else "score", ops)

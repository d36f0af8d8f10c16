"""The head of a decoder: logits of tokens, or scores of labels. A model that only makes vectors has
none; with tied weights the matrix of logits is that of the token embedding."""

from __future__ import annotations

from torch import Tensor

from weft.config.model import ModelConfig
from weft.models.layers.embedding import Embedding, matrix_weight
from weft.models.layers.weight import Weights
from weft.ops.protocol import Matrix, Ops


class LmHead:
    """W x. `name` is that of W in checkpoints, "" if the embedding has it."""

    def __init__(
        self,
        matrix: Matrix,
        shape: tuple[int, int],
        name: str,
        ops: Ops,
    ) -> None:
        self._ops = ops
        self._name = name
        self.matrix = matrix
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab or labels], float32"""
        return self._ops.logits(x, self.matrix)

    def weights(self) -> Weights:
        if self._name:
            yield matrix_weight(self._name, self.shape, self.matrix)


def make_head(
    config: ModelConfig,
    embedding: Embedding,
    ops: Ops,
) -> LmHead | None:
    """The head that a decoder of this configuration has."""
    name = "lm_head"
    num_outputs = config.vocab_size
    if config.pooling is not None:
        name = "score"
        num_outputs = len(config.pooling.labels)
    elif config.tie_embeddings:
        return LmHead(
            embedding.matrix,
            embedding.shape,
            "",
            ops,
        )
    if not num_outputs:
        return None
    matrix = ops.matrix(config.hidden_size, (num_outputs,), precise=True)
    return LmHead(
        matrix,
        (num_outputs, config.hidden_size),
        name,
        ops,
    )

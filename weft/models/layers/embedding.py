"""Token embedding and the head that turns hidden states into logits; with tied weights they are one matrix."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.models.layers.weight import Weight, Weights
from weft.ops.protocol import Matrix, Norm, Ops


class Embedding:
    def __init__(self, vocab_size: int, hidden_size: int, ops: Ops) -> None:
        self._ops = ops
        self.shape = (vocab_size, hidden_size)
        self.matrix: Matrix = ops.matrix(hidden_size, (vocab_size,), precise=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [T] -> [T, hidden]"""
        return self._ops.embed(tokens, self.matrix)

    def weights(self, prefix: str) -> Weights:
        yield _weight(prefix, self.shape, self.matrix)


class Head:
    """The final norm and the logits."""

    def __init__(self, embedding: Embedding, tied: bool, ops: Ops) -> None:
        self._ops = ops
        self.tied = tied
        self.shape = embedding.shape
        vocab_size, hidden_size = self.shape
        self.matrix: Matrix = embedding.matrix if tied else ops.matrix(hidden_size, (vocab_size,), precise=True)

    def __call__(self, hidden: Tensor, norm: Norm) -> Tensor:
        """hidden [S, hidden] -> logits [S, vocab], float32"""
        return self._ops.logits(hidden, self.matrix, norm)

    def weights(self, prefix: str) -> Weights:
        if not self.tied:
            yield _weight(prefix, self.shape, self.matrix)


def _weight(prefix: str, shape: tuple[int, int], matrix: Matrix) -> Weight:
    return Weight(f"{prefix}.weight", shape, partial(matrix.put, 0), partial(matrix.get, 0))

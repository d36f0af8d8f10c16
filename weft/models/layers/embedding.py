"""Token embedding."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.models.layers.weight import MatrixRows, RowRun, Weight, Weights
from weft.ops.protocol import Divided, Matrix, Ops, Shard

# The shard of tables with a row for each token: embeddings, and output heads.
VOCABULARY = Shard(Divided.OUTPUTS)


class Embedding:
    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        ops: Ops,
        *,
        scale: float = 1.0,
    ) -> None:
        self._ops = ops
        self._scale = scale
        self.shape = (vocab_size, hidden_size)
        self.matrix: Matrix = ops.matrix(
            hidden_size,
            (vocab_size,),
            precise=True,
            shard=VOCABULARY,
        )

    def __call__(self, tokens: Tensor, vectors: Tensor | None = None) -> Tensor:
        """tokens [T] -> [T, hidden], times the scale. A token below 0 selects row -1 - token of
        `vectors`, which is not scaled."""
        return self._ops.embed(
            tokens,
            self.matrix,
            vectors,
            self._scale,
        )

    def with_ops(self, ops: Ops, tokens: Tensor) -> Tensor:
        """The same of ids alone, computed by the `ops` of another model with this table."""
        return ops.embed(tokens, self.matrix, None, self._scale)

    def weights(self, prefix: str) -> Weights:
        yield matrix_weight(prefix, self.shape, self.matrix)


def matrix_weight(
    prefix: str,
    shape: tuple[int, int],
    matrix: Matrix,
) -> Weight:
    return Weight(
        f"{prefix}.weight",
        shape,
        partial(matrix.put, 0),
        partial(matrix.get, 0),
        partial(matrix.keep_as, 0),
        partial(matrix.put_codes, 0),
        rows=MatrixRows(matrix, (RowRun(0, 0, 0, shape[0]),)),
    )

"""An indexer (`IndexerSpec`): its projections. `PagedAttention` rotates and keeps its keys, and
attends to the keys that it chooses."""

from __future__ import annotations

from torch import Tensor

from weft.config.decoder import IndexerSpec, LatentSpec
from weft.config.model import ModelConfig
from weft.models.layers.attention import Chooser
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.rope import Rope
from weft.models.layers.weight import Weights
from weft.ops.protocol import Ops


class Indexer:
    """Its key and its weights decide what attention leaves out, and are few: they keep at least
    eight bits."""

    def __init__(
        self,
        config: ModelConfig,
        latent: LatentSpec,
        spec: IndexerSpec,
        rope: Rope,
        ops: Ops,
    ) -> None:
        """`rope` rotates the heads of attention."""
        names = config.decoder.names.latent
        hidden = config.hidden_size
        own = rope.with_pairs(side_by_side=spec.side_by_side)
        self.chooser = Chooser(spec.heads, spec.head_dim, spec.num_chosen, own)
        self._ops = ops
        self._norm_name = names.index_norm
        self._num_queries = spec.heads * spec.head_dim
        parts = {names.index_queries: self._num_queries}
        self._queries = Linear(latent.query_rank, parts, False, ops)
        self._key = Linear(hidden, {names.index_key: spec.head_dim}, False, ops, precise=True)
        self._norm = CenteredNorm(spec.head_dim, spec.norm_eps, ops, has_bias=True)
        self._weights = Linear(hidden, {names.index_weights: spec.heads}, False, ops, precise=True)

    def write(self, x: Tensor, reduced: Tensor, out: Tensor) -> None:
        """Write the columns of `Chooser` to `out` [T, size]. x [T, hidden]; `reduced`
        [T, query_rank]: the vector that queries are products of."""
        ops = self._ops
        head_dim = self.chooser.head_dim
        end = self._num_queries + head_dim
        ops.linear_into(reduced, self._queries.matrix, out[:, : self._num_queries])
        key = ops.computed(self._norm(ops.computed(self._key(x))))
        ops.copy(key[:, None], out[:, None, self._num_queries : end])
        ops.linear_into(x, self._weights.matrix, out[:, end:])

    def weights(self, prefix: str) -> Weights:
        yield from self._queries.weights(prefix)
        yield from self._key.weights(prefix)
        yield from self._norm.weights(f"{prefix}.{self._norm_name}")
        yield from self._weights.weights(prefix)

"""A feed-forward part of two: a dense one for every token, and experts beside it."""

from __future__ import annotations

from torch import Tensor

from weft.config.decoder import MlpSpec, MoeSpec
from weft.config.model import ModelConfig
from weft.models.layers.mlp import GatedMLP
from weft.models.layers.moe import ExpertMLP
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights, vector
from weft.ops.protocol import Norm, Ops


class ExpertsBesideDense:
    """norm(mlp(norm(x))) + norm(experts(norm(x))), with four different norms. The router reads
    x / rms(x) * scale / sqrt(hidden)."""

    def __init__(
        self,
        config: ModelConfig,
        spec: MoeSpec,
        layer: int,
        ops: Ops,
    ) -> None:
        hidden = config.hidden_size

        def norm() -> RmsNorm:
            return RmsNorm(hidden, config.norm_eps, ops, kind=config.decoder.norm)

        self._ops = ops
        self._names = config.decoder.names
        self._pre_dense = norm()
        self._post_dense = norm()
        self._pre_experts = norm()
        self._post_experts = norm()
        self._dense = GatedMLP(
            config,
            MlpSpec(activation=spec.activation),
            ops,
            size=spec.dense_size,
        )
        self._experts = ExpertMLP(config, spec, layer, ops)
        self._router_factor = hidden**-0.5
        self._router_norm = Norm(ops.vector(hidden, exact=True), config.norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]; x is not normed yet."""
        dense = self._post_dense(self._dense(self._pre_dense(x)))
        experts = self._experts(
            self._pre_experts(x),
            self._ops.norm(x, self._router_norm),
        )
        return self._ops.computed(dense) + self._post_experts(experts)

    def weights(self, prefix: str) -> Weights:
        """`prefix` names the layer."""
        names = self._names
        of_experts = names.experts
        yield from self._pre_dense.weights(f"{prefix}.{names.mlp_norm}")
        yield from self._dense.weights(f"{prefix}.{names.mlp}")
        yield from self._post_dense.weights(f"{prefix}.{of_experts.dense_post_norm}")
        yield vector(
            f"{prefix}.{of_experts.router_norm}",
            self._router_norm.weight,
            times=self._router_factor,
        )
        yield from self._pre_experts.weights(f"{prefix}.{of_experts.pre_norm}")
        yield from self._experts.weights(prefix)
        yield from self._post_experts.weights(f"{prefix}.{of_experts.post_norm}")

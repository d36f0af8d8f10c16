"""A feed-forward part made of experts: a router chooses a few experts for each token. A shared part
may serve all tokens in addition."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from weft.config.decoder import MlpSpec, MoeSpec, RouterSpec
from weft.config.model import ModelConfig
from weft.models.layers.expert_tensors import ExpertSizes, expert_weights
from weft.models.layers.linear import INPUTS, OUTPUTS, bias_weight
from weft.models.layers.mlp import make_mlp
from weft.models.layers.weight import Weight, Weights, vector
from weft.ops.protocol import Experts, Ops, Router
from weft.ops.routing import Choice, Scores


class ExpertMLP:
    """The sum over a token's experts of weight * down(activation(gate(x)) * up(x)), or without a
    gate, plus the shared part of all tokens. Source: arXiv:1701.06538."""

    def __init__(
        self,
        config: ModelConfig,
        spec: MoeSpec,
        layer: int,
        ops: Ops,
    ) -> None:
        hidden = config.hidden_size
        num_experts = spec.router.num_experts
        self._ops = ops
        self._names = config.decoder.names.experts
        self._sizes = ExpertSizes(num_experts, hidden, spec.size, spec.bias)
        self._router = RouterLayer(config, spec.router, layer, ops)
        self._experts = Experts(
            ops.expert_matrix(
                num_experts,
                hidden,
                (spec.size,) * (spec.num_matrices - 1),
                bias=spec.bias,
                gated=spec.is_gated,
                shard=OUTPUTS,
            ),
            ops.expert_matrix(
                num_experts,
                spec.size,
                (hidden,),
                bias=spec.bias,
                shard=INPUTS,
            ),
            spec.activation,
        )
        self._shared: SharedMLP | None = None
        if spec.shared_size:
            self._shared = SharedMLP(config, spec, ops)

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]. `routed_by`: the input of the router; None: x."""
        # Computed now, because the router and all experts read it.
        x = self._ops.computed(x)
        routed = self._ops.route(x if routed_by is None else routed_by, self._router.router)
        y = self._ops.experts(x, routed, self._experts)
        if self._shared is None:
            return y
        return y + self._shared(x)

    def weights(self, prefix: str) -> Weights:
        yield from self._router.weights(prefix)
        yield from expert_weights(prefix, self._names, self._sizes, self._experts)
        if self._shared is not None:
            yield from self._shared.weights(prefix)


class RouterLayer:
    """The weights of a router."""

    def __init__(
        self,
        config: ModelConfig,
        spec: RouterSpec,
        layer: int,
        ops: Ops,
    ) -> None:
        self._names = config.decoder.names.experts
        self._has_bias = spec.bias
        self._shape = (spec.num_experts, config.hidden_size)
        choice_bias = None
        if spec.choice_bias:
            choice_bias = ops.vector(spec.num_experts, exact=True)
        expert_scale = None
        if spec.expert_scale:
            expert_scale = ops.vector(spec.num_experts, exact=True)
        matrix = ops.exact_matrix(config.hidden_size, spec.num_experts, bias=spec.bias)
        choice = Choice(
            num_experts=spec.num_experts,
            num_chosen=spec.num_chosen,
            scores=Scores(spec.scores),
            is_normed=spec.is_normed,
            scale=spec.scale,
            num_groups=spec.num_groups,
            num_groups_chosen=spec.num_groups_chosen,
            counts_one=spec.counts_one,
        )
        self.router = Router(matrix, choice, choice_bias, layer, expert_scale)

    def weights(self, prefix: str) -> Weights:
        names = self._names
        matrix = self.router.weight
        yield Weight(
            f"{prefix}.{names.router}.weight",
            self._shape,
            partial(matrix.put, 0),
            partial(matrix.get, 0),
        )
        if self._has_bias:
            yield bias_weight(f"{prefix}.{names.router}.bias", matrix, 0)
        if self.router.choice_bias is not None:
            shape = (1,) * names.choice_bias_has_row + self._shape[:1]
            yield vector(f"{prefix}.{names.choice_bias}", self.router.choice_bias, shape=shape)
        if self.router.expert_scale is not None:
            yield vector(f"{prefix}.{names.expert_scale}", self.router.expert_scale)


class SharedMLP:
    """The part that serves every token, optionally times sigmoid(gate x)."""

    def __init__(self, config: ModelConfig, spec: MoeSpec, ops: Ops) -> None:
        self._ops = ops
        self._names = config.decoder.names.experts
        shared = MlpSpec(
            size=spec.shared_size,
            activation=spec.activation,
            is_gated=spec.is_gated,
            bias=spec.bias,
        )
        self._mlp = make_mlp(config, shared, ops)
        self._gate: Tensor | None = None
        if spec.shared_gate:
            self._gate = ops.vector(config.hidden_size, exact=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        inner = self._mlp.inner(x)
        if self._gate is not None:
            # The gate comes before the last product, because that product may add its output in
            # place.
            inner = self._ops.computed(inner)
            self._ops.gate_rows(inner, x, self._gate)
        return self._mlp.down(inner)

    def weights(self, prefix: str) -> Weights:
        names = self._names
        base = prefix.rpartition(".")[0] if names.shared_is_beside else prefix
        yield from self._mlp.weights(f"{base}.{names.shared}")
        if self._gate is not None:
            name = f"{prefix}.{self._names.shared_gate}.weight"
            yield vector(name, self._gate, shape=(1, len(self._gate)))

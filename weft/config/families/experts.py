"""Reads the experts in a `config.json`. Several families share these keys and routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.config.config_json import count, get, size
from weft.config.decoder import DecoderSpec, MoeSpec, RouterSpec
from weft.config.families.family import Config, activation, flag, scale
from weft.config.model_errors import UnsupportedModel

MAX_EXPERTS = 1024  # limit of weft's kernels (`program.h`)


def softmax_experts(
    config: Config,
    *,
    inner: str = "moe_intermediate_size",
    is_normed: bool = False,
    scores: str = "softmax",
) -> MoeSpec:
    """Experts without a shared part. `inner`: the key of their inner size."""
    # Releases of transformers have different keys for one family.
    count = "num_experts"
    if config.get(count) is None:
        count = "num_local_experts"
    router = RouterSpec(
        num_experts=size(config, count),
        num_chosen=size(config, "num_experts_per_tok"),
        scores=scores,
        is_normed=is_normed,
    )
    return MoeSpec(
        router=checked(router),
        size=size(config, inner),
        activation=activation(config),
    )


def sigmoid_experts(config: Config) -> MoeSpec:
    """Experts like those of DeepSeek V3: chosen by sigmoids with a bias, optionally in groups,
    beside a shared part."""
    router = RouterSpec(
        num_experts=size(config, "n_routed_experts"),
        num_chosen=size(config, "num_experts_per_tok"),
        scores="sigmoid",
        is_normed=flag(config, "norm_topk_prob"),
        scale=scale(config, "routed_scaling_factor"),
        choice_bias=True,
        num_groups=size(config, "n_group", 1),
        num_groups_chosen=size(config, "topk_group", 1),
    )
    inner = size(config, "moe_intermediate_size")
    return MoeSpec(
        router=checked(router),
        size=inner,
        activation=activation(config),
        shared_size=inner * count(config, "n_shared_experts"),
    )


def checked(router: RouterSpec) -> RouterSpec:
    """The same router. Raises UnsupportedModel if its numbers are inconsistent or too large."""
    if router.num_experts > MAX_EXPERTS:
        raise UnsupportedModel(
            f"a layer has {router.num_experts:,} experts; at most {MAX_EXPERTS:,} are supported"
        )
    if router.num_chosen > router.num_experts:
        raise UnsupportedModel(
            f"a token gets {router.num_chosen} experts, but a layer has only {router.num_experts}"
        )
    if router.num_groups == 1:
        return router
    in_group, rest = divmod(router.num_experts, router.num_groups)
    if rest or in_group < 2 or router.num_groups_chosen > router.num_groups:
        raise UnsupportedModel(
            f"{router.num_experts} experts in {router.num_groups} groups (n_group), of which "
            f"{router.num_groups_chosen} are chosen (topk_group): groups must be of one size, at "
            "least 2 experts, and no fewer than are chosen"
        )
    if router.num_chosen > in_group * router.num_groups_chosen:
        raise UnsupportedModel(
            f"a token gets {router.num_chosen} experts, but the groups that are chosen have "
            f"{in_group * router.num_groups_chosen}"
        )
    return router


def with_experts(
    config: Config,
    spec: DecoderSpec,
    experts: MoeSpec,
    has_experts: Callable[[int], bool],
) -> DecoderSpec:
    """The decoder with experts in some of its layers."""
    layers = []
    for index in range(size(config, "num_hidden_layers")):
        layer = spec.layer(index)
        if has_experts(index):
            layer = replace(layer, mlp=experts)
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def sparse_layers(config: Config, num_plain: int) -> Callable[[int], bool]:
    """A function that returns whether a layer has experts: the layers that `mlp_layer_types` calls
    sparse; without that key, all layers after the first `num_plain`."""
    types = get(config, "mlp_layer_types", list, [])

    def has_experts(layer: int) -> bool:
        if types:
            return layer < len(types) and types[layer] == "sparse"
        return layer >= num_plain

    return has_experts

"""DeepSeek V2 and V3, and models that compute like them: attention by latents, and experts beside a
shared part. Kimi K2 and Moonlight have the class of DeepSeek V3; Mistral 4 has queries that grow
with their position, and a router by softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config.config_json import get, number, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeConfig,
    RouterSpec,
)
from weft.config.families.experts import checked, sigmoid_experts, sparse_layers, with_experts
from weft.config.families.family import Config, Family, activation, flag, scale
from weft.config.families.rope import longrope, rope_of
from weft.config.model_errors import UnsupportedModel

GREEDY = "greedy"
BY_GROUPS = "group_limited_greedy"


def _latent(config: Config) -> LatentSpec:
    return LatentSpec(
        rank=size(config, "kv_lora_rank"),
        query_rank=get(config, "q_lora_rank", int, 0),
        plain_dim=size(config, "qk_nope_head_dim"),
        rotated_dim=size(config, "qk_rope_head_dim"),
        value_dim=size(config, "v_head_dim"),
    )


def _rope(config: Config, latent: LatentSpec, side_by_side: bool) -> RopeConfig:
    """The rotation of the rotated part of a head."""
    values = {**get(config, "rope_scaling", dict, {}), **get(config, "rope_parameters", dict, {})}
    # The whole part rotates, whatever its share of a head is.
    values.pop("partial_rotary_factor", None)
    config = {**config, "head_dim": latent.rotated_dim, "partial_rotary_factor": 1.0}
    if _kind(values) == "longrope":
        rope = longrope(config, values)
    else:
        theta = number(config, "rope_theta", 10_000.0, above=0.0)
        rope = rope_of(config, values, theta=theta)
    return replace(rope, dims=latent.rotated_dim, side_by_side=side_by_side)


def _kind(values: Mapping[str, Any]) -> str:
    kind: str = get(values, "rope_type", str, get(values, "type", str, "default"))
    return kind


def _score_scale(config: Config, latent: LatentSpec) -> float:
    """The factor of scores. YaRN's factor is applied twice, for queries and for keys, and also to
    the part without positions."""
    found = 1 / math.sqrt(latent.query_dim)
    values = {**get(config, "rope_scaling", dict, {}), **get(config, "rope_parameters", dict, {})}
    refined = get(values, "mscale_all_dim", float, 0.0)
    if _kind(values) == "default" or not refined:
        return found
    factor = number(values, "factor", above=0.0)
    if factor <= 1:
        return found
    temperature = 0.1 * refined * math.log(factor) + 1
    return found * temperature * temperature


def _layer(config: Config, *, side_by_side: bool) -> LayerSpec:
    latent = _latent(config)
    bias = flag(config, "attention_bias")
    return LayerSpec(
        attention=AttentionSpec(
            rope=_rope(config, latent, side_by_side),
            scale=_score_scale(config, latent),
            qkv_bias=bias,
            out_bias=bias,
            latent=latent,
        ),
        mlp=MlpSpec(activation=activation(config)),
    )


def _deepseek2(config: Config) -> DecoderSpec:
    plain = DecoderSpec(layers=(_layer(config, side_by_side=True),))
    has_experts = sparse_layers(config, get(config, "first_k_dense_replace", int, 0))
    return with_experts(config, plain, _softmax_experts(config), has_experts)


def _softmax_experts(config: Config) -> MoeSpec:
    """The experts of DeepSeek V2: weights come from the softmax over all experts, and a group is
    chosen by its best expert."""
    method = get(config, "topk_method", str, GREEDY)
    if method not in (GREEDY, BY_GROUPS):
        raise UnsupportedModel(
            f"topk_method is {method!r}; only {GREEDY!r} and {BY_GROUPS!r} are supported"
        )
    if flag(config, "norm_topk_prob"):
        raise UnsupportedModel("norm_topk_prob is true, which this architecture does not compute")
    has_groups = method == BY_GROUPS
    router = RouterSpec(
        num_experts=size(config, "n_routed_experts"),
        num_chosen=size(config, "num_experts_per_tok"),
        scale=scale(config, "routed_scaling_factor"),
        num_groups=size(config, "n_group", 1) if has_groups else 1,
        num_groups_chosen=size(config, "topk_group", 1) if has_groups else 1,
        counts_one=has_groups,
    )
    inner = size(config, "moe_intermediate_size")
    return MoeSpec(
        router=checked(router),
        size=inner,
        activation=activation(config),
        shared_size=inner * get(config, "n_shared_experts", int, 0),
    )


def _deepseek3(config: Config) -> DecoderSpec:
    spec = _youtu(config)
    has_experts = sparse_layers(config, get(config, "first_k_dense_replace", int, 0))
    return with_experts(config, spec, sigmoid_experts(config), has_experts)


def read_mistral4(config: Config) -> DecoderSpec:
    layer = _layer(config, side_by_side=flag(config, "rope_interleave", True))
    rope = layer.attention.rope
    assert rope is not None
    growth = get(get(config, "rope_parameters", dict, {}), "llama_4_scaling_beta", float, 0.0)
    attention = replace(layer.attention, rope=replace(rope, query_growth=growth))
    experts = sigmoid_experts(config)
    router = replace(experts.router, scores="softmax", choice_bias=False)
    has_experts = sparse_layers(config, get(config, "first_k_dense_replace", int, 0))
    plain = DecoderSpec(layers=(replace(layer, attention=attention),))
    return with_experts(config, plain, replace(experts, router=router), has_experts)


def _youtu(config: Config) -> DecoderSpec:
    layer = _layer(config, side_by_side=flag(config, "rope_interleave", True))
    return DecoderSpec(layers=(layer,))


def _minicpm3(config: Config) -> DecoderSpec:
    hidden_size = size(config, "hidden_size")
    if config.get("v_head_dim") is None:
        config = {**config, "v_head_dim": hidden_size // size(config, "num_attention_heads")}
    layer = _layer(config, side_by_side=False)
    num_layers = size(config, "num_hidden_layers")
    depth = number(config, "scale_depth", math.sqrt(num_layers), above=0.0)
    layer = replace(layer, residual_scale=depth / math.sqrt(num_layers))
    return DecoderSpec(
        layers=(layer,),
        embedding_scale=scale(config, "scale_emb"),
        logit_scale=size(config, "dim_model_base", hidden_size) / hidden_size,
    )


FAMILIES = {
    "DeepseekV2": Family(read=_deepseek2),
    "DeepseekV3": Family(
        read=_deepseek3,
        defaults={
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "Glm4MoeLite": Family(
        read=_deepseek3,
        defaults={
            "first_k_dense_replace": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
    ),
    "Mistral4": Family(
        read=read_mistral4,
        defaults={
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
    "Youtu": Family(read=_youtu),
    "MiniCPM3": Family(
        read=_minicpm3,
        defaults={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    ),
}

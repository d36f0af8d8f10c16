"""DeepSeek V2 and V3, and models that compute like them: attention by latents, and experts beside a
shared part. Kimi K2 and Moonlight have the class of DeepSeek V3; Mistral 4 has queries that grow
with their position, and a router by softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config.config_json import MAX_SIZE, count, get, number, rope_theta, section, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LatentNames,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeConfig,
    RouterSpec,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import checked, sigmoid_experts, sparse_layers, with_experts
from weft.config.families.family import Config, Family, activation, flag, scale
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import longrope, rope_of, rope_values
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

GREEDY = "greedy"
BY_GROUPS = "group_limited_greedy"


def _latent(config: Config) -> LatentSpec:
    return LatentSpec(
        rank=size(config, "kv_lora_rank"),
        query_rank=count(config, "q_lora_rank", most=MAX_SIZE),
        plain_dim=size(config, "qk_nope_head_dim"),
        rotated_dim=size(config, "qk_rope_head_dim"),
        value_dim=size(config, "v_head_dim"),
    )


def _rope(config: Config, latent: LatentSpec, side_by_side: bool) -> RopeConfig:
    """The rotation of the rotated part of a head."""
    values = rope_values(config)
    # The whole part rotates, whatever its share of a head is.
    values.pop("partial_rotary_factor", None)
    config = {**config, "head_dim": latent.rotated_dim, "partial_rotary_factor": 1.0}
    if _kind(values) == "longrope":
        rope = longrope(config, values)
    else:
        rope = rope_of(config, values, theta=rope_theta(config))
    return replace(rope, dims=latent.rotated_dim, side_by_side=side_by_side)


def _kind(values: Mapping[str, Any]) -> str:
    kind: str = get(values, "rope_type", str, get(values, "type", str, "default"))
    return kind


def _score_scale(config: Config, latent: LatentSpec) -> float:
    """The factor of scores. YaRN's factor is applied twice, for queries and for keys, and also to
    the part without positions."""
    found = 1 / math.sqrt(latent.query_dim)
    values = rope_values(config)
    refined = number(values, "mscale_all_dim", 0.0, low=0.0)
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


def _names(config: Config) -> TensorNames:
    # This key is only in weft's own config.json (GGUF files, below).
    if flag(config, "head_matrices_are_apart"):
        return TensorNames(latent=LatentNames(keys_out="k_b_proj", values_out="v_b_proj"))
    return TensorNames()


def _deepseek2(config: Config) -> DecoderSpec:
    plain = DecoderSpec(layers=(_layer(config, side_by_side=True),), names=_names(config))
    has_experts = sparse_layers(config, count(config, "first_k_dense_replace"))
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
        shared_size=inner * count(config, "n_shared_experts"),
    )


def read_deepseek3(config: Config) -> DecoderSpec:
    spec = _youtu(config)
    has_experts = sparse_layers(config, count(config, "first_k_dense_replace"))
    return with_experts(config, spec, sigmoid_experts(config), has_experts)


def read_mistral4(config: Config) -> DecoderSpec:
    layer = _layer(config, side_by_side=flag(config, "rope_interleave", True))
    rope = layer.attention.rope
    assert rope is not None
    values = section(config, "rope_parameters")
    growth = number(values, "llama_4_scaling_beta", 0.0, low=0.0)
    attention = replace(layer.attention, rope=replace(rope, query_growth=growth))
    experts = sigmoid_experts(config)
    router = replace(experts.router, scores="softmax", choice_bias=False)
    has_experts = sparse_layers(config, count(config, "first_k_dense_replace"))
    plain = DecoderSpec(layers=(replace(layer, attention=attention),), names=_names(config))
    return with_experts(config, plain, replace(experts, router=router), has_experts)


def _youtu(config: Config) -> DecoderSpec:
    layer = _layer(config, side_by_side=flag(config, "rope_interleave", True))
    return DecoderSpec(layers=(layer,), names=_names(config))


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
        names=_names(config),
        embedding_scale=scale(config, "scale_emb"),
        logit_scale=size(config, "dim_model_base", hidden_size) / hidden_size,
    )


# GGUF files


def _gguf_latents(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """The sizes of heads. Since 2025 files have two tensors for K and V of all heads; their key and
    value lengths are then those of the cache, and further keys have those of the heads."""
    rotated = keys.number("rope.dimension_count", int)
    key_length = keys.number("attention.key_length", int, found["head_dim"])
    value_length = keys.number("attention.value_length", int, found["head_dim"])
    plain = keys.number("attention.key_length_mla", int, key_length) - rotated
    return {
        "kv_lora_rank": keys.number("attention.kv_lora_rank", int),
        "q_lora_rank": keys.number("attention.q_lora_rank", int, 0),
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.number("attention.value_length_mla", int, value_length),
        "num_key_value_heads": found["num_attention_heads"],
        "head_dim": rotated,
        "head_matrices_are_apart": keys.has("attn_k_b.weight"),
        "attention_bias": False,
    }


def gguf_deepseek2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """DeepSeek V2 or V3, or Youtu: by the scores of the router, if there is one."""
    more: JsonObject = {**_gguf_latents(keys, found), **_gguf_yarn(keys, found)}
    scores = keys.number("expert_gating_func", int, gguf.SOFTMAX) or gguf.SOFTMAX
    if not keys.has("ffn_gate_inp.weight"):
        return {**more, "architectures": ["YoutuForCausalLM"]}
    if scores not in (gguf.SOFTMAX, gguf.SIGMOID):
        raise UnsupportedModel(
            f"{keys.full('expert_gating_func')} is {scores}; {gguf.SOFTMAX} and {gguf.SIGMOID} "
            "are supported"
        )
    # Files before November 2025 do not contain the groups of V3, which has 256 experts.
    num_experts = keys.number("expert_count", int)
    is_v3 = scores == gguf.SIGMOID and num_experts == 256
    num_groups = keys.number("expert_group_count", int, 8 if is_v3 else 1)
    more |= {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": keys.number("expert_used_count", int),
        "moe_intermediate_size": keys.number("expert_feed_forward_length", int),
        "n_shared_experts": keys.number("expert_shared_count", int, 0),
        "first_k_dense_replace": keys.number("leading_dense_block_count", int, 0),
        "routed_scaling_factor": gguf.factor("expert_weights_scale", keys),
        "norm_topk_prob": keys.number(gguf.NORMED, bool, False),
        "n_group": num_groups or 1,
        "topk_group": keys.number("expert_group_used_count", int, 4 if is_v3 else 1) or 1,
    }
    if scores == gguf.SIGMOID:
        return {**more, "architectures": ["DeepseekV3ForCausalLM"]}
    return {**more, "topk_method": GREEDY if num_groups in (0, 1) else BY_GROUPS}


def _gguf_yarn(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Files have a tenth of `mscale_all_dim`, which `mscale` equals in all released models."""
    mscale = keys.number("rope.scaling.yarn_log_multiplier", float, 0.0)
    rope = found["rope_parameters"]
    if not mscale or rope["rope_type"] != "yarn":
        return {}
    mscale = round(10 * mscale, 5)
    return {"rope_parameters": {**rope, "mscale": mscale, "mscale_all_dim": mscale}}


def _gguf_mistral4(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Mistral 4. Its queries grow with their position."""
    more = gguf_deepseek2(keys, found)
    rope: JsonObject = more.get("rope_parameters") or found["rope_parameters"]
    growth = keys.number("attention.temperature_scale", float, 0.0)
    return {
        **more,
        "architectures": found["architectures"],
        "rope_parameters": {**rope, "llama_4_scaling_beta": growth},
    }


def _gguf_minicpm3(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """MiniCPM 3. Files do not contain its factors, which are those of its only model."""
    more = _gguf_latents(keys, found)
    more["v_head_dim"] = found["hidden_size"] // max(found["num_attention_heads"], 1)
    short, long = keys.short_and_long_factors()
    if not long:
        return more
    original = keys.number(
        "rope.scaling.original_context_length", int, found["max_position_embeddings"]
    )
    rope = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", float, 10_000.0),
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
    }
    return {**more, "rope_parameters": rope}


GGUF_PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
GGUF_JOINED = ("attn_k_b.weight", "attn_v_b.weight")


FAMILIES = {
    "DeepseekV2": Family(
        read=_deepseek2,
        gguf={
            "deepseek2": gguf.Architecture(
                more=gguf_deepseek2,
                reads=gguf.EXPERTS,
                parts=GGUF_PARTS,
                joined=GGUF_JOINED,
                is_latent=True,
            )
        },
    ),
    "DeepseekV3": Family(
        read=read_deepseek3,
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
        read=read_deepseek3,
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
        gguf={
            "mistral4": gguf.Architecture(
                more=_gguf_mistral4,
                reads=gguf.EXPERTS,
                parts=GGUF_PARTS,
                joined=GGUF_JOINED,
                is_latent=True,
            )
        },
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
        gguf={
            "minicpm3": gguf.Architecture(
                more=_gguf_minicpm3, parts=GGUF_PARTS, joined=GGUF_JOINED, is_latent=True
            )
        },
    ),
}

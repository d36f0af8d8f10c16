"""Granite 3, with experts or without, and Granite 4 without: Llama with factors in four places.
Granite 4 stores gate and up as one tensor, leaves positions out in some models, and has Mamba 2 in
place of attention in most layers of others. NAVER's
HyperCLOVA X has these factors, too, and norms behind each part."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, require
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    NormPlace,
    StateNames,
    TensorNames,
)
from weft.config.families.experts import softmax_experts
from weft.config.families.family import FULL, Config, Family, activation, flag, layer_types, scale
from weft.config.families.rope import read_rope
from weft.config.families.states import LINEAR, read_mamba, with_states

_KINDS = {"attention": FULL, "mamba": LINEAR}  # as older files call them


def _granite(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            scale=scale(config, "attention_multiplier"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config), bias=flag(config, "mlp_bias")),
        residual_scale=scale(config, "residual_multiplier"),
    )
    return DecoderSpec(
        layers=(layer,),
        embedding_scale=scale(config, "embedding_multiplier"),
        logit_scale=1 / scale(config, "logits_scaling"),
    )


def _granite_moe(config: Config) -> DecoderSpec:
    spec = _granite(config)
    experts = softmax_experts(
        config,
        inner="intermediate_size",
        scores="chosen",
    )
    names = TensorNames(
        mlp="block_sparse_moe",
        experts=ExpertNames(
            router="router.layer",
            all_gate_up="input_linear.weight",
            all_down="output_linear.weight",
        ),
    )
    return replace(spec, layers=(replace(spec.layer(0), mlp=experts),), names=names)


def _granite4(config: Config) -> DecoderSpec:
    require(config, "num_local_experts", 0)
    kinds = [_KINDS.get(kind, kind) for kind in get(config, "layer_types", list)]
    told = {**config, "layer_types": kinds}
    spec = _granite(config)
    layer = spec.layer(0)
    attention = layer.attention
    if config.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    spec = replace(
        spec,
        layers=(replace(layer, attention=attention),),
        names=TensorNames(
            mlp="shared_mlp",
            gate_up=("input_linear",),
            down="output_linear",
            state=StateNames(mixer="mamba", inputs=("in_proj",)),
        ),
    )
    if LINEAR not in layer_types(told, _of_granite, (FULL, LINEAR)):
        return spec
    return with_states(told, spec, read_mamba(config), LINEAR, _of_granite)


def _of_granite(layer: int) -> str:
    return LINEAR


def _hyperclovax(config: Config) -> DecoderSpec:
    """Its logits are multiplied by what divides those of Granite."""
    spec = _granite(config)
    layer = spec.layer(0)
    if config.get("attention_multiplier") is None:
        layer = replace(layer, attention=replace(layer.attention, scale=0.0))
    if flag(config, "use_post_norm", True):
        layer = replace(layer, norms=NormPlace.BOTH)
    return replace(
        spec,
        layers=(layer,),
        logit_scale=scale(config, "logits_scaling"),
        names=TensorNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2"),
    )


FAMILIES = {
    "Granite": Family(read=_granite),
    "HyperCLOVAX": Family(read=_hyperclovax),
    "GraniteMoe": Family(
        read=_granite_moe,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "GraniteMoeHybrid": Family(
        read=_granite4,
        aliases={"intermediate_size": "shared_intermediate_size"},
        defaults={"num_local_experts": 8},
    ),
}

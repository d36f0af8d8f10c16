"""Granite 3 and the dense Granite 4: Llama with factors in four places. Granite 4 stores gate and
up as one tensor, and leaves positions out in some models."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, require
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, TensorNames
from weft.config.families.family import FULL, Config, Family, activation, flag, scale
from weft.config.families.rope import read_rope
from weft.config.model_errors import UnsupportedModel


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


def _granite4(config: Config) -> DecoderSpec:
    require(config, "num_local_experts", 0)
    for kind in get(config, "layer_types", list):
        if kind not in (FULL, "attention"):
            raise UnsupportedModel(
                f"layer_types has {str(kind)[:64]!r}; of Granite 4 only models are supported "
                "whose layers are all attention"
            )
    spec = _granite(config)
    layer = spec.layer(0)
    attention = layer.attention
    if config.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    return replace(
        spec,
        layers=(replace(layer, attention=attention),),
        names=TensorNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"),
    )


FAMILIES = {
    "Granite": Family(read=_granite),
    "GraniteMoeHybrid": Family(
        read=_granite4,
        aliases={"intermediate_size": "shared_intermediate_size"},
        defaults={"num_local_experts": 8},
    ),
}

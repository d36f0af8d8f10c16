"""Phi-1 to Phi-4. The first two have parallel attention and feed-forward part, and biases
everywhere. Phi-3 and Phi-4 are Llama with q, k and v in one tensor, gate and up in another, and
special frequencies for long contexts."""

from __future__ import annotations

from weft.config.config_json import get, require
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPlace,
    RopeConfig,
    TensorNames,
)
from weft.config.families.family import Config, Family, activation, window
from weft.config.families.rope import longrope, read_rope


def _phi(config: Config) -> DecoderSpec:
    require(config, "qk_layernorm", False)
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpSpec(
            activation=activation(config, ("gelu_new",)),
            is_gated=False,
            bias=True,
        ),
        norms=NormPlace.PARALLEL,
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER_BIAS,
        names=TensorNames(
            out="dense",
            gate_up=("fc1",),
            down="fc2",
            norm="model.final_layernorm",
        ),
        head_bias=True,
    )


def _phi3(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(rope=_phi3_rope(config), window=window(config)),
        mlp=MlpSpec(activation=activation(config)),
    )
    return DecoderSpec(
        layers=(layer,),
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    )


def _phi3_rope(config: Config) -> RopeConfig:
    values = {**get(config, "rope_scaling", dict, {}), **get(config, "rope_parameters", dict, {})}
    # The first releases have other names for the same scaling.
    if get(values, "rope_type", str, get(values, "type", str, "")) in ("longrope", "su", "yarn"):
        return longrope(config, values)
    return read_rope(config, is_partial=True)


FAMILIES = {
    "Phi": Family(
        read=_phi,
        defaults={"partial_rotary_factor": 0.5},
        norm_eps_key="layer_norm_eps",
    ),
    "Phi3": Family(read=_phi3),
}

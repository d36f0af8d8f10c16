"""Phi-3 and Phi-4: Llama with q, k and v in one tensor, gate and up in another, and frequencies of
their own for long contexts."""

from __future__ import annotations

from weft.config.config_json import get
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    RopeConfig,
    TensorNames,
)
from weft.config.families.family import Config, Family, activation, window
from weft.config.families.rope import longrope, read_rope


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
    # The first releases have other names for the same.
    if get(values, "rope_type", str, get(values, "type", str, "")) in ("longrope", "su", "yarn"):
        return longrope(config, values)
    return read_rope(config, is_partial=True)


FAMILIES = {"Phi3": Family(read=_phi3)}

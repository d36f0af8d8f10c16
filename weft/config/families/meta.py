"""Llama, and what computes as it does with flags of its `config.json`."""

from __future__ import annotations

from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.rope import read_rope


def read_llama(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config), bias=flag(config, "mlp_bias")),
    )
    return DecoderSpec(layers=(layer,))


FAMILIES = {"Llama": Family(read=read_llama)}

"""Llama, and models that compute like it with flags of its `config.json`; CWM is Llama with a
window in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec
from weft.config.families import gguf
from weft.config.families.family import (
    FULL,
    SLIDING,
    Config,
    Family,
    flag,
    layer_types,
    mlp_of,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.json_types import JsonObject


def read_llama(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=mlp_of(config),
    )
    return DecoderSpec(layers=(layer,))


def _cwm(config: Config) -> DecoderSpec:
    """The first of every four layers sees all tokens."""
    like = read_llama({"rope_theta": 1_000_000.0, **config}).layer(0)
    layers = []
    for kind in layer_types(config, lambda layer: SLIDING if layer % 4 else FULL):
        attention = replace(like.attention, window=window(config, kind))
        layers.append(replace(like, attention=attention))
    return DecoderSpec(layers=tuple(layers))


# GGUF files


def _is_mixtral(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"architectures": ["MixtralForCausalLM"]}


_gguf_mixtral = gguf.experts(
    gguf.SOFTMAX,
    {
        **gguf.COUNTS,
        "intermediate_size": gguf.SIZE,
        "sliding_window": gguf.GgufKey(gguf.WINDOW, int, 0),
    },
    _is_mixtral,
)


def gguf_llama(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Llama; with experts, Mixtral."""
    if keys.number("expert_count", int, 0):
        return _gguf_mixtral(keys, found)
    window = keys.number("attention.sliding_window", int, 0)
    if not window:
        return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


FAMILIES = {
    "Llama": Family(
        read=read_llama,
        gguf={
            # Also Mistral, SmolLM, and every other model that computes like Llama.
            "llama": gguf.Architecture(
                more=gguf_llama, reads=gguf.EXPERTS, has_pairs=True, parts=gguf.MIXTRAL_NAMES
            ),
            "internlm2": gguf.Architecture(has_pairs=True),
            "exaone": gguf.Architecture(),
        },
    ),
    "Cwm": Family(read=_cwm, defaults={"sliding_window": 8_192, "head_dim": 128}),
}

"""Command R and its successors: attention and feed-forward part are parallel, with one norm by mean
and deviation for both. In Command R7B and A, layers that see all tokens have no positions."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
)
from weft.config.families import gguf
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    every,
    flag,
    layer_types,
    scale,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.json_types import JsonObject


def _cohere(config: Config) -> DecoderSpec:
    require(config, "use_qk_norm", False)
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=500_000.0, side_by_side=True),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config)),
        norms=NormPosition.PARALLEL,
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER,
        logit_scale=scale(config, "logit_scale", 0.0625),
    )


def _cohere2(config: Config) -> DecoderSpec:
    spec = _cohere({"rope_theta": 10_000.0, **config})
    sliding = spec.layer(0)
    full = replace(sliding, attention=replace(sliding.attention, rope=None))
    sliding = replace(sliding, attention=replace(sliding.attention, window=window(config)))
    kinds = layer_types(config, every(size(config, "sliding_window_pattern", 4)))
    layers = [full if kind == FULL else sliding for kind in kinds]
    return replace(spec, layers=tuple(layers))


# GGUF files


def _gguf_cohere(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"logit_scale": gguf.factor("logit_scale", keys)}


def _gguf_cohere2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    window = keys.number("attention.sliding_window", int, 4_096)
    return {**_gguf_cohere(keys, found), "sliding_window": window}


_TIED = {"tie_word_embeddings": True}
FAMILIES = {
    "Cohere": Family(
        read=_cohere,
        defaults=_TIED,
        norm_eps_key="layer_norm_eps",
        gguf={
            "command-r": gguf.Architecture(
                more=_gguf_cohere, reads=("logit_scale",), norm_eps=gguf.LAYER_NORM_EPS
            )
        },
    ),
    "Cohere2": Family(
        read=_cohere2,
        defaults={"sliding_window": 4_096, **_TIED},
        norm_eps_key="layer_norm_eps",
        gguf={
            "cohere2": gguf.Architecture(
                more=_gguf_cohere2, reads=("logit_scale",), norm_eps=gguf.LAYER_NORM_EPS
            )
        },
    ),
}

"""GLM-4: half of each head turns, in pairs that lie side by side; the release of April 2025 also
norms what attention and the feed-forward part give."""

from __future__ import annotations

from dataclasses import replace

from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormPlace,
    TensorNames,
)
from weft.config.families.family import Config, Family, activation, flag
from weft.config.families.rope import read_rope


def _glm(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True, side_by_side=True),
            qkv_bias=flag(config, "attention_bias", True),
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    return DecoderSpec(layers=(layer,), names=TensorNames(gate_up=("gate_up_proj",)))


def _glm4(config: Config) -> DecoderSpec:
    spec = _glm(config)
    names = replace(
        spec.names,
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    return replace(spec, layers=(replace(spec.layer(0), norms=NormPlace.BOTH),), names=names)


_DEFAULTS = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
FAMILIES = {
    "Glm": Family(read=_glm, defaults=_DEFAULTS),
    "Glm4": Family(read=_glm4, defaults=_DEFAULTS),
}

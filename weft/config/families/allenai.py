"""OLMo. OLMo 1 has norms without weights. OLMo 2 and 3 have norms after attention and the
feed-forward part, and norms over all queries and over all keys. OLMoE has the latter, and
experts."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require, rope_theta, section
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    NormPosition,
    QkNorm,
    RopeConfig,
)
from weft.config.families import gguf
from weft.config.families.experts import softmax_experts
from weft.config.families.family import (
    SLIDING,
    Config,
    Family,
    activation,
    every,
    flag,
    layer_types,
    window,
)
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.meta import read_llama
from weft.config.families.rope import read_rope, rope_by_type, rope_of
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

OLMO3_THETA = 500_000.0


def _olmo(config: Config) -> DecoderSpec:
    require(config, "clip_qkv")
    return replace(read_llama(config), norm=NormKind.LAYER_PLAIN)


def _layer(config: Config, rope: RopeConfig) -> LayerSpec:
    bias = flag(config, "attention_bias")
    return LayerSpec(
        attention=AttentionSpec(
            rope=rope,
            qk_norm=QkNorm.ALL_HEADS,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config)),
        norms=NormPosition.POST,
    )


def _olmo2(config: Config) -> DecoderSpec:
    return DecoderSpec(layers=(_layer(config, read_rope(config)),))


def _olmo3(config: Config) -> DecoderSpec:
    layers = []
    for kind in layer_types(config, every(4)):
        layer = _layer(config, _olmo3_rope(config, kind))
        attention = replace(layer.attention, window=window(config, kind))
        layers.append(replace(layer, attention=attention))
    return DecoderSpec(layers=tuple(layers))


def _olmo3_rope(config: Config, kind: str) -> RopeConfig:
    """The rotation of one kind of layers. Older files have a scaling only for the layers that see
    all tokens."""
    if "rope_parameters" in config:
        return rope_by_type(config, kind, OLMO3_THETA)
    theta = rope_theta(config, OLMO3_THETA)
    if kind == SLIDING:
        return rope_of(config, {}, theta=theta)
    return rope_of(config, section(config, "rope_scaling"), theta=theta)


def _olmoe(config: Config) -> DecoderSpec:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModel("clip_qkv is not supported")
    experts = softmax_experts(
        config,
        inner="intermediate_size",
        is_normed=flag(config, "norm_topk_prob"),
    )
    layer = _layer(config, read_rope(config))
    return DecoderSpec(layers=(replace(layer, mlp=experts, norms=NormPosition.PRE),))


# GGUF files


def _gguf_olmo2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """OLMo 2, or OLMo 3, which has the same name, and windows; its layers with a window rotate
    without scaling."""
    window = keys.number("attention.sliding_window", int, 0)
    if not window:
        return {}
    rope = found["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }


_gguf_olmoe = gguf.experts(
    gguf.SOFTMAX,
    {
        **gguf.COUNTS,
        "intermediate_size": gguf.SIZE,
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, False),
    },
)


FAMILIES = {
    "Olmo": Family(
        read=_olmo,
        defaults={"rms_norm_eps": 1e-5},
        gguf={"olmo": gguf.Architecture(norm_eps=gguf.LAYER_NORM_EPS, has_pairs=True)},
    ),
    "Olmo2": Family(
        read=_olmo2, gguf={"olmo2": gguf.Architecture(more=_gguf_olmo2, parts=gguf.NORMS_AFTER)}
    ),
    "Olmoe": Family(
        read=_olmoe,
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
        gguf={"olmoe": gguf.Architecture(more=_gguf_olmoe, reads=gguf.EXPERTS)},
    ),
    "Olmo3": Family(read=_olmo3, defaults={"sliding_window": 4_096}),
}

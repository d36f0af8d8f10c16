"""Families of several makers with experts: rednote (dots), JetBrains (Mellum 2), Upstage (Solar
Open)."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import count
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    QkNorm,
)
from weft.config.families import gguf
from weft.config.families.experts import (
    sigmoid_experts,
    softmax_experts,
    sparse_layers,
    with_experts,
)
from weft.config.families.family import (
    FULL,
    Config,
    Family,
    activation,
    flag,
    layer_types,
    window,
)
from weft.config.families.rope import read_rope, rope_by_type


def _dots1(config: Config) -> DecoderSpec:
    plain = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config),
            qk_norm=QkNorm.HEAD,
            qkv_bias=flag(config, "attention_bias"),
            out_bias=flag(config, "attention_bias"),
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    num_plain = count(config, "first_k_dense_replace")
    types = layer_types(config, lambda _: FULL)
    layers = []
    for kind in types:
        attention = replace(plain.attention, window=window(config, kind))
        layers.append(replace(plain, attention=attention))
    return with_experts(
        config,
        DecoderSpec(layers=tuple(layers)),
        sigmoid_experts(config),
        lambda layer: layer >= num_plain,
    )


def _mellum(config: Config) -> DecoderSpec:
    """Mellum 2: Qwen 3 with experts, and a separate rotation for each kind of layers."""
    experts = softmax_experts(config, is_normed=flag(config, "norm_topk_prob", True))
    bias = flag(config, "attention_bias")
    layers = []
    for kind in layer_types(config, lambda _: FULL):
        attention = AttentionSpec(
            rope=rope_by_type(config, kind, 500_000.0 if kind == FULL else 10_000.0),
            window=window(config, kind),
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            out_bias=bias,
        )
        layers.append(LayerSpec(attention=attention, mlp=MlpSpec(activation=activation(config))))
    spec = DecoderSpec(layers=tuple(layers))
    return with_experts(config, spec, experts, sparse_layers(config, 0))


def _solar_open(config: Config) -> DecoderSpec:
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, theta=1_000_000.0, is_partial=True),
            qkv_bias=flag(config, "attention_bias"),
        ),
        mlp=sigmoid_experts(config),
    )
    return DecoderSpec(layers=(layer,))


FAMILIES = {
    "Dots1": Family(
        read=_dots1,
        gguf={"dots1": gguf.Architecture(more=gguf.sigmoid_experts, reads=gguf.EXPERTS)},
    ),
    "Mellum": Family(
        read=_mellum,
        defaults={
            "head_dim": 128,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "sliding_window": 1_024,
        },
    ),
    "SolarOpen": Family(
        read=_solar_open,
        aliases={"intermediate_size": "moe_intermediate_size"},
        defaults={
            "head_dim": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
    ),
}

"""gpt-oss: every second layer has a window, heads have sinks, and the feed-forward part is experts
whose gates and ups are clamped."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require
from weft.config.decoder import AttentionSpec, DecoderSpec, ExpertNames, LayerSpec, TensorNames
from weft.config.families.experts import softmax_experts
from weft.config.families.family import Config, Family, every, flag, layer_types, window
from weft.config.families.rope import read_rope


def _gpt_oss(config: Config) -> DecoderSpec:
    require(config, "swiglu_limit", 7.0)
    require(config, "swiglu_alpha", 1.702)
    bias = flag(config, "attention_bias", True)
    experts = softmax_experts(config, inner="intermediate_size", scores="chosen")
    experts = replace(
        experts,
        router=replace(experts.router, bias=True),
        activation="clamped_swiglu",
        bias=True,
    )
    attention = AttentionSpec(
        rope=read_rope(config, theta=150_000.0),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    layers = []
    for kind in layer_types(config, every(2)):
        of_layer = replace(attention, window=window(config, kind))
        layers.append(LayerSpec(attention=of_layer, mlp=experts))
    names = ExpertNames(router="router")
    if not flag(config, "gates_and_ups_are_apart"):  # only in weft's own config.json
        names = replace(names, is_transposed=True, alternate=True)
    return DecoderSpec(layers=tuple(layers), names=TensorNames(experts=names))


FAMILIES = {
    "GptOss": Family(
        read=_gpt_oss,
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
}

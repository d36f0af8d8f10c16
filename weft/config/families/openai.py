"""gpt-oss: every second layer has a window, heads have sinks, and the feed-forward part is experts
whose gates and ups are clamped."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require
from weft.config.decoder import AttentionSpec, DecoderSpec, ExpertNames, LayerSpec, TensorNames
from weft.config.families import gguf
from weft.config.families.experts import softmax_experts
from weft.config.families.family import Config, Family, every, flag, layer_types, window
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.json_types import JsonObject


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


# GGUF files


def _gguf_of_gpt_oss(keys: ArchitectureKeys, found: Found) -> JsonObject:
    rope = {**found["rope_parameters"], "truncate": False}
    return {"gates_and_ups_are_apart": True, "rope_parameters": rope}


_gguf_gpt_oss = gguf.experts(
    gguf.SOFTMAX_OF_CHOSEN,
    {
        **gguf.COUNTS,
        "intermediate_size": gguf.SIZE,
        "sliding_window": gguf.GgufKey(gguf.WINDOW, int, 128),
    },
    _gguf_of_gpt_oss,
)


FAMILIES = {
    "GptOss": Family(
        read=_gpt_oss,
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        gguf={
            "gpt-oss": gguf.Architecture(
                more=_gguf_gpt_oss,
                reads=gguf.EXPERTS,
                parts={
                    **gguf.MLP_NORM,
                    "attn_sinks.weight": "self_attn.sinks",
                    "ffn_gate_inp": "mlp.router",
                },
            )
        },
    ),
}

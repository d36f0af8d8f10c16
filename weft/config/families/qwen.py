"""Qwen 2 and 3, their models of experts, and the text part of those that also see. Some of their
checkpoints use a window from a layer on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.config.config_json import get, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QkNorm,
    TensorNames,
)
from weft.config.families.experts import softmax_experts, with_experts
from weft.config.families.family import FULL, Config, Family, activation, flag, window
from weft.config.families.rope import read_rope


def _qwen2(config: Config) -> DecoderSpec:
    attention = AttentionSpec(rope=read_rope(config), qkv_bias=True)
    return _layers(config, attention)


def _qwen3(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    attention = AttentionSpec(
        rope=read_rope(config),
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
    return _layers(config, attention)


def _layers(config: Config, attention: AttentionSpec) -> DecoderSpec:
    """`attention` is that of layers which see everything."""
    full = LayerSpec(attention=attention, mlp=MlpSpec(activation=activation(config)))
    width = window(config)
    if not flag(config, "use_sliding_window") or not width:
        return DecoderSpec(layers=(full,))
    sliding = replace(full, attention=replace(attention, window=width))
    num_layers = size(config, "num_hidden_layers")
    types = get(config, "layer_types", list, [])
    first_sliding = get(config, "max_window_layers", int, 28)
    layers = []
    for index in range(num_layers):
        is_full = index < first_sliding
        if types:
            is_full = index < len(types) and types[index] == FULL
        layers.append(full if is_full else sliding)
    return DecoderSpec(layers=tuple(layers))


def _qwen2_moe(config: Config) -> DecoderSpec:
    """The experts of Qwen 2 have a shared one with a gate of its own."""
    bias = flag(config, "qkv_bias", True)
    attention = AttentionSpec(rope=read_rope(config), qkv_bias=bias)
    experts = replace(
        _experts(config),
        shared_size=size(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    spec = some_with_experts(config, _layers(config, attention), experts)
    names = ExpertNames(shared="shared_expert")
    return replace(spec, names=TensorNames(experts=names))


def _qwen3_moe(config: Config) -> DecoderSpec:
    return some_with_experts(config, _qwen3(config), _experts(config))


def _experts(config: Config) -> MoeSpec:
    return softmax_experts(config, is_normed=flag(config, "norm_topk_prob"))


def some_with_experts(config: Config, spec: DecoderSpec, experts: MoeSpec) -> DecoderSpec:
    """Each `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""
    step = size(config, "decoder_sparse_step", 1)
    plain = get(config, "mlp_only_layers", list, [])

    def has_experts(layer: int) -> bool:
        return layer not in plain and (layer + 1) % step == 0

    return with_experts(config, spec, experts, has_experts)


def of_text(read: Callable[[Config], DecoderSpec]) -> Callable[[Config], DecoderSpec]:
    """The reader of a model that also sees. Its positions have three parts (mrope), which are equal
    in text: then it rotates as others do."""

    def read_text(config: Config) -> DecoderSpec:
        text = dict(config)
        for key in ("rope_scaling", "rope_parameters"):
            values = get(config, key, dict, {})
            if "mrope" in (values.get("type"), values.get("rope_type")):
                text[key] = {**values, "type": "default", "rope_type": "default"}
        return read(text)

    return read_text


FAMILIES = {
    "Qwen2": Family(read=_qwen2),
    # Xiaomi's: Qwen 2, and layers that guess ahead, which are not read.
    "MiMo": Family(read=_qwen2),
    "Qwen3": Family(read=_qwen3, defaults={"head_dim": 128}),
    "Qwen2Moe": Family(read=_qwen2_moe),
    "Qwen3Moe": Family(read=_qwen3_moe),
}
_QWEN2_VL = Family(read=of_text(_qwen2))
ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": Family(read=of_text(_qwen3), defaults={"head_dim": 128}),
}

"""Qwen 2 and 3, their models with experts, and the text part of those that take pictures. Some
checkpoints use a window from a certain layer on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.config.config_json import get, section, size
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
from weft.config.families import gguf
from weft.config.families.experts import softmax_experts, with_experts
from weft.config.families.family import FULL, Config, Family, activation, flag, head_dim_of, window
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import NUM_AXES, axes_of_sections, interleaved_axes, read_rope
from weft.config.model_errors import UnsupportedModel
from weft.config.vision import qwen as towers
from weft.json_types import JsonObject


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
    """The decoder. `attention`: that of layers that see all tokens."""
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
    """Qwen 2 with experts, and a shared expert with its own gate."""
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
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    step = size(config, "decoder_sparse_step", 1)
    plain = get(config, "mlp_only_layers", list, [])

    def has_experts(layer: int) -> bool:
        return layer not in plain and (layer + 1) % step == 0

    return with_experts(config, spec, experts, has_experts)


def _qwen3_vl(config: Config) -> DecoderSpec:
    return _with_deepstack(config, _qwen3(config))


def _qwen3_vl_moe(config: Config) -> DecoderSpec:
    """Qwen3-VL with experts. The maker's files have one tensor for all experts, with the inputs
    first; the key that says otherwise is only in weft's own config.json (GGUF files)."""
    experts = softmax_experts(config, is_normed=True)
    spec = some_with_experts(config, _qwen3(config), experts)
    if not flag(config, "experts_have_outputs_first"):
        names = replace(spec.names, experts=ExpertNames(is_transposed=True))
        spec = replace(spec, names=names)
    return _with_deepstack(config, spec)


def _with_deepstack(config: Config, spec: DecoderSpec) -> DecoderSpec:
    vision = section(config, "vision_config")
    layers = get(vision, "deepstack_visual_indexes", list, [8, 16, 24])
    return replace(spec, deepstack=len(layers))


def seeing(
    read: Callable[[Config], DecoderSpec],
    sections: tuple[int, int, int],
    *,
    interleaved: bool = False,
) -> Callable[[Config], DecoderSpec]:
    """The reader of a model that also takes pictures: tokens have three positions (M-RoPE), which
    are equal in text. `sections`: default of a file without them. Source: arXiv:2409.12191, 2.1;
    interleaved: arXiv:2511.21631."""

    def read_seeing(config: Config) -> DecoderSpec:
        values: JsonObject = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = section(config, key)
            if "mrope" in (part.get("type"), part.get("rope_type")):
                part = {**part, "type": "default", "rope_type": "default"}
            values.update(part)
        spec = read({**config, "rope_parameters": values})
        found = get(values, "mrope_section", list, list(sections))
        layers = []
        for layer in spec.layers:
            rope = layer.attention.rope
            assert rope is not None, "attention without positions"
            rope = replace(rope, axes=_axes(config, found, rope.share, interleaved=interleaved))
            layers.append(replace(layer, attention=replace(layer.attention, rope=rope)))
        return replace(spec, layers=tuple(layers))

    return read_seeing


def _axes(
    config: Config, sections: list[Any], share: float, *, interleaved: bool
) -> tuple[int, ...]:
    head_dim = head_dim_of(config)
    num_pairs = int(head_dim * share) // 2
    if len(sections) != NUM_AXES or not all(type(one) is int and one >= 0 for one in sections):
        raise UnsupportedModel(
            f"mrope_section is {str(sections)[:64]}; it must be three numbers of pairs"
        )
    if interleaved:
        return interleaved_axes(sections, num_pairs)
    if sum(sections) != num_pairs:
        raise UnsupportedModel(
            f"mrope_section is {sections}, for {sum(sections):,} pairs; {num_pairs} turn in a head"
        )
    return axes_of_sections(sections)


# GGUF files


def _qkv_bias(keys: ArchitectureKeys, found: Found) -> JsonObject:
    return {"qkv_bias": found["attention_bias"]}


_gguf_qwen2_moe = gguf.experts(
    gguf.SOFTMAX,
    {
        **gguf.COUNTS,
        "moe_intermediate_size": gguf.SIZE,
        "shared_expert_intermediate_size": gguf.GgufKey(
            "expert_shared_feed_forward_length", int, like="intermediate_size"
        ),
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, False),
    },
    _qkv_bias,
)

_gguf_qwen3_moe = gguf.experts(
    gguf.SOFTMAX,
    {
        **gguf.COUNTS,
        "moe_intermediate_size": gguf.SIZE,
        "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, True),
    },
)

GGUF_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

GGUF_ROWS = ("ffn_gate_inp_shexp.weight",)


FAMILIES = {
    # The text of Qwen2-VL and Qwen2.5-VL is that of Qwen 2, as long as there are no pictures.
    "Qwen2": Family(read=_qwen2, gguf=dict.fromkeys(("qwen2", "qwen2vl"), gguf.Architecture())),
    # Xiaomi's model: Qwen 2, with further layers that predict tokens ahead (`config/heads.py`).
    "MiMo": Family(read=_qwen2),
    "Qwen3": Family(
        read=_qwen3,
        defaults={"head_dim": 128},
        gguf=dict.fromkeys(("qwen3", "qwen3vl"), gguf.Architecture()),
    ),
    "Qwen2Moe": Family(
        read=_qwen2_moe,
        gguf={
            "qwen2moe": gguf.Architecture(
                more=_gguf_qwen2_moe, reads=gguf.EXPERTS, parts=GGUF_SHARED, rows=GGUF_ROWS
            )
        },
    ),
    "Qwen3Moe": Family(
        read=_qwen3_moe,
        gguf=dict.fromkeys(
            ("qwen3moe", "qwen3vlmoe"),
            gguf.Architecture(more=_gguf_qwen3_moe, reads=gguf.EXPERTS),
        ),
    ),
}
_QWEN2_VL = Family(read=seeing(_qwen2, (16, 24, 24)), tower=towers.qwen2_vl, ties_by_text=True)
_QWEN3_VL_SECTIONS = (24, 20, 20)
ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2_VL, tower=towers.qwen2_5_vl),
    "Qwen3VLForConditionalGeneration": Family(
        read=seeing(_qwen3_vl, _QWEN3_VL_SECTIONS, interleaved=True),
        defaults={"head_dim": 128},
        tower=towers.qwen3_vl,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        read=seeing(_qwen3_vl_moe, _QWEN3_VL_SECTIONS, interleaved=True),
        defaults={"head_dim": 128},
        tower=towers.qwen3_vl,
    ),
}

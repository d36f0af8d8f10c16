"""Qwen3-Next and Qwen3.5: three of four layers keep a state by the gated delta rule; the fourth has
attention with a gate."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, size
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    ExpertNames,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormKind,
    QkNorm,
    StateNames,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.experts import softmax_experts, with_experts
from weft.config.families.family import FULL, Config, Family, activation, flag
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.qwen import GGUF_ROWS, GGUF_SHARED, seeing, some_with_experts
from weft.config.families.rope import read_rope
from weft.config.families.states import LINEAR, read_gated_delta, with_states
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.qwen import qwen3_5
from weft.json_types import JsonObject

_NAMES = TensorNames(experts=ExpertNames(shared="shared_expert"))
_FUSED = StateNames(inputs=("in_proj_qkvz",), rates=("in_proj_ba",))
_HALF_FUSED = StateNames(rates=("in_proj_ba",))


def _qwen3_5(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            rope=read_rope(config, is_partial=True),
            gate=True,
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=MlpSpec(activation=activation(config)),
    )
    period = size(config, "full_attention_interval", 4)

    def kind_of(index: int) -> str:
        return LINEAR if (index + 1) % period else FULL

    norm = NormKind.RMS_PLUS_ONE
    if flag(config, "norm_weights_are_whole"):
        norm = NormKind.RMS_EXACT
    names = _with_state_names(config, StateNames())
    spec = DecoderSpec(layers=(layer,), norm=norm, names=names)
    return with_states(config, spec, read_gated_delta(config), LINEAR, kind_of)


def _qwen3_5_moe(config: Config) -> DecoderSpec:
    experts = _experts(config, is_normed=True)
    return with_experts(config, _qwen3_5(config), experts, lambda _: True)


def _qwen3_next(config: Config) -> DecoderSpec:
    """Qwen3-Next. The projections of the delta rule are two tensors, whose rows are grouped by key
    head; in GGUF files the first may be two tensors."""
    spec = _qwen3_5(config)
    names = _FUSED
    if flag(config, "linear_inputs_are_apart"):
        names = _HALF_FUSED
    spec = replace(spec, names=_with_state_names(config, names))
    if not get(config, "num_experts", int, 0):
        return spec
    experts = _experts(config, is_normed=flag(config, "norm_topk_prob", True))
    return some_with_experts(config, spec, experts)


def _with_state_names(config: Config, names: StateNames) -> TensorNames:
    is_final = flag(config, "decays_are_final")
    return replace(_NAMES, state=replace(names, decay_is_final=is_final))


def _experts(config: Config, *, is_normed: bool) -> MoeSpec:
    return replace(
        softmax_experts(config, is_normed=is_normed),
        shared_size=size(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


# GGUF files


def _gguf_gated_delta(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3-Next and Qwen3.5. Converters have added 1 to the weights of norms, and written the
    decay -exp(A_log) instead of A_log."""
    wanted = {
        "linear_num_key_heads": gguf.GgufKey("ssm.group_count", int),
        "linear_num_value_heads": gguf.GgufKey("ssm.time_step_rank", int),
        "linear_key_head_dim": gguf.GgufKey("ssm.state_size", int),
        "linear_conv_kernel_dim": gguf.GgufKey("ssm.conv_kernel", int),
    }
    values = gguf.said(keys, found, wanted)
    inner_size = keys.number("ssm.inner_size", int)
    num_heads = values["linear_num_value_heads"]
    if num_heads < 1 or inner_size % num_heads:
        raise UnsupportedModel(
            f"{keys.full('ssm.inner_size')} is {inner_size}; it must be a multiple of "
            f"{keys.full('ssm.time_step_rank')}, which is {num_heads}"
        )
    return {
        **values,
        "linear_value_head_dim": inner_size // num_heads,
        "norm_weights_are_whole": True,
        "decays_are_final": True,
    }


def _gguf_qwen3_5(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3.5. Converters have put the first value head of every key head before the second."""
    return {**_gguf_gated_delta(keys, found), "value_heads_are_tiled": True}


def _linear_inputs(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Qwen3-Next. Files of the first converter have one tensor, like the model's own files."""
    return {"linear_inputs_are_apart": keys.has("attn_gate.weight")}


_GGUF_EXPERTS = {
    **gguf.COUNTS,
    "moe_intermediate_size": gguf.SIZE,
    "shared_expert_intermediate_size": gguf.GgufKey("expert_shared_feed_forward_length", int),
    "norm_topk_prob": gguf.GgufKey(gguf.NORMED, bool, True),
}

_gguf_qwen3_next = gguf.experts(gguf.SOFTMAX, _GGUF_EXPERTS, _gguf_gated_delta, _linear_inputs)

_gguf_qwen3_5_moe = gguf.experts(gguf.SOFTMAX, _GGUF_EXPERTS, _gguf_qwen3_5)

_GGUF_NAMES = {
    **gguf.MLP_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

_GGUF_STATES = gguf.StateLayers(
    tensor="ssm_conv1d.weight", kind="linear_attention", attention_has_gate=True
)


_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
_SECTIONS = (11, 11, 10)  # pairs per position of M-RoPE
_QWEN3_5 = Family(read=seeing(_qwen3_5, _SECTIONS, interleaved=True), defaults=_DEFAULTS)
_QWEN3_5_MOE = Family(
    read=seeing(_qwen3_5_moe, _SECTIONS, interleaved=True),
    defaults=_DEFAULTS,
    # The files have no size of a plain feed-forward part.
    aliases={"intermediate_size": "moe_intermediate_size"},
)
FAMILIES = {
    "Qwen3Next": Family(
        read=_qwen3_next,
        defaults=_DEFAULTS,
        gguf={
            "qwen3next": gguf.Architecture(
                more=_gguf_qwen3_next,
                reads=gguf.EXPERTS,
                is_partial=True,
                parts={**_GGUF_NAMES, **GGUF_SHARED},
                rows=GGUF_ROWS,
                convs=gguf.STATE_CONVS,
                states=_GGUF_STATES,
            )
        },
    ),
    "Qwen3_5": replace(
        _QWEN3_5,
        gguf={
            "qwen35": gguf.Architecture(
                more=_gguf_qwen3_5,
                is_partial=True,
                parts=_GGUF_NAMES,
                convs=gguf.STATE_CONVS,
                states=_GGUF_STATES,
            )
        },
    ),
    "Qwen3_5Moe": replace(
        _QWEN3_5_MOE,
        gguf={
            "qwen35moe": gguf.Architecture(
                more=_gguf_qwen3_5_moe,
                reads=gguf.EXPERTS,
                is_partial=True,
                parts={**_GGUF_NAMES, **GGUF_SHARED},
                rows=GGUF_ROWS,
                convs=gguf.STATE_CONVS,
                states=_GGUF_STATES,
            )
        },
    ),
}
ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, tower=qwen3_5),
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_MOE, tower=qwen3_5),
}

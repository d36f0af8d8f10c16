"""Falcon-H1: attention and Mamba 2 read the same input beside each other in every layer. Fixed
factors stand at many places; all but those of embeddings and logits are multiplied into weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.config.config_json import get, require
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MambaSpec,
    RowFactor,
    ScanNorm,
    StateNames,
    TensorFactors,
    TensorNames,
)
from weft.config.families import gguf
from weft.config.families.family import Config, Family, flag, mlp_of, scale
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.rope import read_rope
from weft.config.families.states import (
    GGUF_MAMBA,
    GGUF_MAMBA_FLAT,
    MambaKeys,
    gguf_mamba,
    gguf_mamba_names,
    read_mamba,
)
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

_KEYS = MambaKeys(inner="mamba_d_ssm")
_NAMES = TensorNames(
    mlp="feed_forward",
    mlp_norm="pre_ff_layernorm",
    norm="model.final_layernorm",
    state=StateNames(mixer="mamba", inputs=("in_proj",)),
)


def _falcon_h1(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    state = replace(read_mamba(config, _KEYS), norm=_norm(config))
    require(config, "projectors_bias", state.bias)
    names = replace(_NAMES.state, decay_is_final=flag(config, "decays_are_final"))
    layer = LayerSpec(
        attention=AttentionSpec(rope=read_rope(config), qkv_bias=bias, out_bias=bias),
        state=state,
        mlp=mlp_of(config),
    )
    return DecoderSpec(
        layers=(layer,),
        names=replace(_NAMES, state=names),
        factors=_factors(config, state),
        embedding_scale=scale(config, "embedding_multiplier"),
        logit_scale=scale(config, "lm_head_multiplier"),
    )


def _norm(config: Config) -> ScanNorm:
    if not flag(config, "mamba_rms_norm"):
        return ScanNorm.NONE
    if flag(config, "mamba_norm_before_gate", True):
        return ScanNorm.NORM_FIRST
    return ScanNorm.GATE_FIRST


def _factors(config: Config, state: MambaSpec) -> tuple[TensorFactors, ...]:
    """The factors of tensors that are not 1. A factor of an output belongs to the bias, too; one of
    an input does not."""
    into = scale(config, "attention_in_multiplier")
    keys = scale(config, "key_multiplier")
    out = scale(config, "attention_out_multiplier")
    state_in = scale(config, "ssm_in_multiplier")
    state_out = scale(config, "ssm_out_multiplier")
    gate, down = _list(config, "mlp_multipliers", 2)
    parts = _list(config, "ssm_multipliers", 5)
    shared = state.groups * state.state_dim
    sizes = (state.out_size, state.out_size, shared, shared, state.heads)
    rows = tuple(map(RowFactor, sizes, parts))
    into_rows = tuple(RowFactor(num, state_in * factor) for num, factor in rows)
    found = (
        TensorFactors("mamba.in_proj.weight", into_rows),
        TensorFactors("mamba.in_proj.bias", rows),
        _all_rows("self_attn.q_proj.weight", into),
        _all_rows("self_attn.k_proj.weight", into * keys),
        _all_rows("self_attn.k_proj.bias", keys),
        _all_rows("self_attn.v_proj.weight", into),
        *_of_output("self_attn.o_proj", out),
        *_of_output("mamba.out_proj", state_out),
        *_of_output("feed_forward.gate_proj", gate),
        *_of_output("feed_forward.down_proj", down),
    )
    return tuple(one for one in found if any(row.factor != 1 for row in one.rows))


def _of_output(name: str, factor: float) -> Sequence[TensorFactors]:
    return _all_rows(f"{name}.weight", factor), _all_rows(f"{name}.bias", factor)


def _all_rows(name: str, factor: float) -> TensorFactors:
    return TensorFactors(name, (RowFactor(0, factor),))


def _list(config: Config, key: str, num: int) -> list[float]:
    """The numbers of a key, each 1 without it. Raises BadConfig and UnsupportedModel."""
    values = get(config, key, list, [1.0] * num)
    if len(values) != num:
        raise UnsupportedModel(f"{key} has {len(values)} numbers; {num} are expected")
    return [scale({key: value}, key) for value in values]


# GGUF files: all factors are in the weights.

_gguf_keys = gguf_mamba(_KEYS)


def _gguf_falcon_h1(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """llama.cpp computes a norm, if there is one, after the gate."""
    return {
        **_gguf_keys(keys, found),
        "projectors_bias": keys.has("ssm_out.bias"),
        "mamba_rms_norm": keys.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


_GGUF_NAMES = {
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


FAMILIES = {
    "FalconH1": Family(
        read=_falcon_h1,
        gguf={
            "falcon-h1": gguf.Architecture(
                more=_gguf_falcon_h1,
                parts={**gguf_mamba_names("mamba"), **_GGUF_NAMES},
                outside={"output_norm": "model.final_layernorm"},
                flat=GGUF_MAMBA_FLAT,
                convs=gguf.STATE_CONVS,
                states=replace(GGUF_MAMBA, with_attention=True),
            )
        },
    )
}

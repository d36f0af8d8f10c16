"""Mamba 1 and 2 as their authors publish them, and Falcon Mamba: every layer is one mixer with a
state, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require, size
from weft.config.decoder import DecoderSpec, LayerSpec, StateNames, TensorNames
from weft.config.families import gguf
from weft.config.families.family import Config, Family, flag
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.families.states import (
    GGUF_MAMBA,
    GGUF_MAMBA_FLAT,
    MambaKeys,
    gguf_mamba,
    gguf_mamba_names,
    read_mamba,
    read_mamba1,
)
from weft.json_types import JsonObject

_KEYS = MambaKeys(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state_dim="state_size",
    taps="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    expand="expand",
)
_NAMES = TensorNames(
    attention_norm="norm",
    norm="backbone.norm_f",
    embedding="backbone.embeddings",
    layers="backbone.layers",
    state=StateNames(mixer="mixer", inputs=("in_proj",)),
)
# The files have no limit of positions, and no sizes of attention. Tables of the scheduler have room
# for this limit.
_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def _inner_size(config: Config) -> JsonObject:
    """The size of the mixer, which some files give by a factor."""
    if config.get("intermediate_size"):
        return {}
    return {"intermediate_size": size(config, "expand", 2) * size(config, "hidden_size")}


def _mamba2(config: Config) -> DecoderSpec:
    require(config, "hidden_act", "silu", "swish")
    layer = LayerSpec(attends=False, state=read_mamba(config, _KEYS), mlp=None)
    state = replace(_NAMES.state, decay_is_final=flag(config, "decays_are_final"))
    return DecoderSpec(layers=(layer,), names=replace(_NAMES, state=state))


def _mamba1(config: Config) -> DecoderSpec:
    require(config, "hidden_act", "silu", "swish")
    layer = LayerSpec(attends=False, state=read_mamba1(config), mlp=None)
    state = replace(_NAMES.state, decay_is_final=flag(config, "decays_are_final"))
    return DecoderSpec(layers=(layer,), names=replace(_NAMES, state=state))


# GGUF files

_gguf_keys = gguf_mamba(_KEYS)


def _gguf_mamba2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Files say 0 for the sizes of parts that there are none of, and no limit of positions."""
    size = keys.number("ssm.inner_size", int)
    return {**_DEFAULTS, **_gguf_keys(keys, found), "intermediate_size": size}


_GGUF_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}


def _gguf_mamba1(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Files of Falcon Mamba say so by a key; its norms have the eps of all norms."""
    wanted = {
        "state_size": gguf.GgufKey("ssm.state_size", int),
        "time_step_rank": gguf.GgufKey("ssm.time_step_rank", int),
        "conv_kernel": gguf.GgufKey("ssm.conv_kernel", int),
    }
    has_norms = keys.number("ssm.dt_b_c_rms", bool, False)
    return {
        **_DEFAULTS,
        **gguf.said(keys, found, wanted),
        "intermediate_size": keys.number("ssm.inner_size", int),
        "use_conv_bias": keys.has("ssm_conv1d.bias"),
        "use_bias": keys.has("ssm_in.bias"),
        "mixer_rms_eps": found["layer_norm_epsilon"] if has_norms else 0.0,
        "decays_are_final": True,
    }


_GGUF_NAMES1 = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out": "mixer.out_proj",
}
_MAMBA1 = Family(
    read=_mamba1,
    implied=_inner_size,
    defaults={**_DEFAULTS, "tie_word_embeddings": True},
    norm_eps_key="layer_norm_epsilon",
)


FAMILIES = {
    "FalconMamba": replace(_MAMBA1, defaults={**_MAMBA1.defaults, "mixer_rms_eps": 1e-6}),
    "Mamba": replace(
        _MAMBA1,
        gguf={
            "mamba": gguf.Architecture(
                more=_gguf_mamba1,
                parts=_GGUF_NAMES1,
                outside=_GGUF_NAMES,
                layers="backbone.layers",
                convs=gguf.STATE_CONVS,
                states=replace(GGUF_MAMBA, one_part=True),
            )
        },
    ),
    "Mamba2": Family(
        read=_mamba2,
        implied=_inner_size,
        defaults={**_DEFAULTS, "num_heads": 128, "n_groups": 8, "state_size": 128},
        norm_eps_key="layer_norm_epsilon",
        gguf={
            "mamba2": gguf.Architecture(
                more=_gguf_mamba2,
                parts={"attn_norm": "norm", **gguf_mamba_names("mixer")},
                outside=_GGUF_NAMES,
                layers="backbone.layers",
                flat=GGUF_MAMBA_FLAT,
                convs=gguf.STATE_CONVS,
                states=replace(GGUF_MAMBA, one_part=True),
            )
        },
    ),
}

"""Mamba 2 as its authors publish it: every layer is one mixer with a state, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import require
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
# The files have no limit of positions, and no sizes of attention and of a feed-forward part. Tables
# of the scheduler have room for this limit.
_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 1,
}


def _mamba2(config: Config) -> DecoderSpec:
    require(config, "hidden_act", "silu", "swish")
    layer = LayerSpec(attends=False, state=read_mamba(config, _KEYS), mlp=None)
    state = replace(_NAMES.state, decay_is_final=flag(config, "decays_are_final"))
    return DecoderSpec(layers=(layer,), names=replace(_NAMES, state=state))


# GGUF files

_gguf_keys = gguf_mamba(_KEYS)


def _gguf_mamba2(keys: ArchitectureKeys, found: Found) -> JsonObject:
    """Files say 0 for the sizes of parts that there are none of, and no limit of positions."""
    return {**_DEFAULTS, **_gguf_keys(keys, found)}


_GGUF_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}


FAMILIES = {
    "Mamba2": Family(
        read=_mamba2,
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

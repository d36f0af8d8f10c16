"""Mamba 2 as its authors publish it: every layer is one mixer with a state, and nothing else."""

from __future__ import annotations

from weft.config.config_json import require
from weft.config.decoder import DecoderSpec, LayerSpec, StateNames, TensorNames
from weft.config.families.family import Config, Family
from weft.config.families.states import MambaKeys, read_mamba

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
    "intermediate_size": 1,
}


def _mamba2(config: Config) -> DecoderSpec:
    require(config, "hidden_act", "silu", "swish")
    layer = LayerSpec(attends=False, state=read_mamba(config, _KEYS), mlp=None)
    return DecoderSpec(layers=(layer,), names=_NAMES)


FAMILIES = {
    "Mamba2": Family(
        read=_mamba2,
        defaults={**_DEFAULTS, "num_heads": 128, "n_groups": 8, "state_size": 128},
        norm_eps_key="layer_norm_epsilon",
    ),
}

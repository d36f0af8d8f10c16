"""Reads the mixers in a `config.json` that keep a state, and refuses sizes that weft does not
compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.config.config_json import get, number, size
from weft.config.decoder import (
    STATE_LANES,
    DecoderSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)
from weft.config.families.family import FULL, Config, flag, layer_types
from weft.config.families.gguf import ArchitectureKeys, Found, GgufKey, Reader, StateLayers, said
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

MAX_TAPS = 4  # maximum for a convolution in weft's kernels
LINEAR = "linear_attention"
CONV = "conv"
# The forms of "no limit" of Mamba 2's steps in files.
NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def read_gated_delta(config: Config) -> GatedDeltaSpec:
    """The gated delta rule of Qwen3-Next and Qwen3.5."""
    spec = GatedDeltaSpec(
        key_heads=size(config, "linear_num_key_heads", 16),
        value_heads=size(config, "linear_num_value_heads", 32),
        key_dim=size(config, "linear_key_head_dim", 128),
        value_dim=size(config, "linear_value_head_dim", 128),
        taps=size(config, "linear_conv_kernel_dim", 4),
        is_tiled=flag(config, "value_heads_are_tiled"),
    )
    _check_taps(spec.taps, "linear_conv_kernel_dim")
    check_lanes(spec.key_dim, "linear_key_head_dim")
    check_lanes(spec.value_dim, "linear_value_head_dim")
    if spec.value_heads % spec.key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads is {spec.value_heads}; it must be a multiple of "
            f"linear_num_key_heads, which is {spec.key_heads}"
        )
    return spec


def read_short_conv(config: Config) -> ShortConvSpec:
    """The short convolution of LFM2."""
    spec = ShortConvSpec(
        channels=size(config, "hidden_size"),
        taps=size(config, "conv_L_cache", 3),
        bias=flag(config, "conv_bias"),
    )
    _check_taps(spec.taps, "conv_L_cache")
    check_lanes(spec.channels, "hidden_size")
    return spec


class MambaKeys(NamedTuple):
    """The keys of Mamba 2 in the files of a family; by default those of Granite 4."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    expand: str = "mamba_expand"
    inner: str = ""  # the number of values of all heads; "": `expand` times hidden_size
    times_hidden: bool = True  # False: the number of values follows from the heads


OF_GRANITE = MambaKeys()


def read_mamba(config: Config, keys: MambaKeys = OF_GRANITE) -> MambaSpec:
    """Mamba 2, with a norm after the gate."""
    heads = size(config, keys.heads, 128)
    head_dim = _head_dim(config, keys, heads)
    limit = get(config, "time_step_limit", list, NO_LIMITS[0])
    if limit not in NO_LIMITS:
        raise UnsupportedModel(f"time_step_limit is {str(limit)[:64]}; no limit is supported")
    spec = MambaSpec(
        heads=heads,
        groups=size(config, keys.groups, 1),
        head_dim=head_dim,
        state_dim=size(config, keys.state_dim, 256),
        taps=size(config, keys.taps, 4),
        conv_bias=flag(config, keys.conv_bias, True),
        bias=flag(config, keys.bias),
    )
    _check_taps(spec.taps, keys.taps)
    check_lanes(spec.head_dim, keys.head_dim)
    check_lanes(spec.state_dim, keys.state_dim)
    if heads % spec.groups:
        raise UnsupportedModel(
            f"{keys.heads} is {heads}; it must be a multiple of {keys.groups}, which is "
            f"{spec.groups}"
        )
    return spec


def _head_dim(config: Config, keys: MambaKeys, heads: int) -> int:
    """The number of values of a head. Raises UnsupportedModel if the file contradicts itself."""
    if not keys.times_hidden:
        return size(config, keys.head_dim)
    inner = size(config, keys.expand, 2) * size(config, "hidden_size")
    name = f"{keys.expand} times hidden_size"
    if keys.inner and config.get(keys.inner) is not None:
        inner = size(config, keys.inner)
        name = keys.inner
    head_dim = inner // heads
    if config.get(keys.head_dim, "auto") != "auto":
        head_dim = size(config, keys.head_dim)
    if head_dim * heads != inner:
        raise UnsupportedModel(
            f"{keys.head_dim} is {head_dim}; times {keys.heads}, which is {heads}, it must be "
            f"{name}: {inner}"
        )
    return head_dim


def gguf_mamba(names: MambaKeys = OF_GRANITE) -> Reader:
    """The reader of the keys of Mamba 2 in a GGUF file. Converters have written the decay
    -exp(A_log) instead of A_log (`decays_are_final`)."""
    wanted = {
        names.heads: GgufKey("ssm.time_step_rank", int),
        names.groups: GgufKey("ssm.group_count", int),
        names.state_dim: GgufKey("ssm.state_size", int),
        names.taps: GgufKey("ssm.conv_kernel", int),
    }

    def read(keys: ArchitectureKeys, found: Found) -> JsonObject:
        values = said(keys, found, wanted)
        values[names.head_dim] = _inner_per(keys, "ssm.time_step_rank", values[names.heads])
        if names.inner:
            values[names.inner] = keys.number("ssm.inner_size", int)
        elif names.times_hidden:
            values[names.expand] = _inner_per(keys, "embedding_length", found["hidden_size"])
        return {
            **values,
            names.conv_bias: keys.has("ssm_conv1d.bias"),
            names.bias: keys.has("ssm_in.bias"),
            "decays_are_final": True,
        }

    return read


def _inner_per(keys: ArchitectureKeys, name: str, value: int) -> int:
    """The inner size, divided by the value of a key. Raises UnsupportedModel if it is no multiple
    of that."""
    inner = keys.number("ssm.inner_size", int)
    if value < 1 or inner % value:
        raise UnsupportedModel(
            f"{keys.full('ssm.inner_size')} is {inner}; it must be a multiple of "
            f"{keys.full(name)}, which is {value}"
        )
    return inner // value


def gguf_mamba_names(mixer: str) -> dict[str, str]:
    """The names of the tensors of Mamba 2 in a GGUF file, and weft's."""
    return {
        "ssm_in": f"{mixer}.in_proj",
        "ssm_conv1d": f"{mixer}.conv1d",
        "ssm_dt.bias": f"{mixer}.dt_bias",
        "ssm_a": f"{mixer}.A_log",
        "ssm_d": f"{mixer}.D",
        "ssm_norm": f"{mixer}.norm",
        "ssm_out": f"{mixer}.out_proj",
    }


GGUF_MAMBA_FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
GGUF_MAMBA = StateLayers(tensor="ssm_conv1d.weight", kind=LINEAR)


def read_mamba1(config: Config) -> Mamba1Spec:
    """Mamba 1; of Falcon Mamba, with norms."""
    hidden_size = size(config, "hidden_size")
    rank = -(-hidden_size // 16)
    if config.get("time_step_rank", "auto") != "auto":
        rank = size(config, "time_step_rank")
    spec = Mamba1Spec(
        channels=size(config, "intermediate_size"),
        state_dim=size(config, "state_size", 16),
        step_rank=rank,
        taps=size(config, "conv_kernel", 4),
        conv_bias=flag(config, "use_conv_bias", True),
        bias=flag(config, "use_bias"),
        norm_eps=number(config, "mixer_rms_eps", 0.0, low=0.0),
    )
    _check_taps(spec.taps, "conv_kernel")
    check_lanes(spec.channels, "intermediate_size")
    check_lanes(spec.state_dim, "state_size")
    return spec


def with_states(
    config: Config,
    spec: DecoderSpec,
    state: StateSpec,
    kind: str,
    default: Callable[[int], str],
) -> DecoderSpec:
    """The decoder with this state in place of attention in the layers of this kind. `default` gives
    the kind of a layer if the file does not. Raises UnsupportedModel."""
    layers: list[LayerSpec] = []
    for index, found in enumerate(layer_types(config, default, (FULL, kind))):
        layer = spec.layer(index)
        if found == kind:
            layer = replace(layer, state=state, attends=False)
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def _check_taps(taps: int, key: str) -> None:
    if not 2 <= taps <= MAX_TAPS:
        raise UnsupportedModel(f"{key} is {taps}; 2 to {MAX_TAPS} are supported")


def check_lanes(value: int, key: str) -> None:
    """Raise UnsupportedModel for a size of states that kernels do not compute."""
    if value % STATE_LANES:
        raise UnsupportedModel(f"{key} is {value}; multiples of {STATE_LANES} are supported")

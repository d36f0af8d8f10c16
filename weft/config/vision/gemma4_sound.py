"""Gemma 4's encoder of sounds, a conformer: two convolutions make a vector of four frames; each
layer has attention to the vectors just before, by distance, and a convolution, between two
feed-forward parts. Source: arXiv:2303.01037 (USM)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, section, size
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.conformer import (
    MAX_REACH,
    ConformerSpec,
    channels_of,
    require_no_clipping,
)
from weft.config.vision.gemma4 import gemma4
from weft.config.vision.joint import joined
from weft.config.vision.spec import TowerSpec

TOWER = "audio_tower"
FIRST = f"{TOWER}.subsample_conv_projection"
MAX_TOKENS = 750  # of a sound of 30 s
KEY_SCALE = math.log(1 + math.e) / math.log(2)


@dataclass(frozen=True, kw_only=True)
class Gemma4SoundSpec(ConformerSpec):
    last_size: int  # numbers of a vector before its projection to the decoder

    @property
    def num_parameters(self) -> int:
        outer = (self.hidden_size + self.out_size) * self.last_size
        return self.num_conformer_parameters + outer

    @property
    def num_work_floats(self) -> int:
        return self.num_work_floats_of(MAX_TOKENS)

    @property
    def shown_name(self) -> str:
        return f"Gemma 4's encoder of sounds of {self.num_layers} layers, 25 tokens a second"


def gemma4_sound(config: Mapping[str, Any], out_size: int) -> Gemma4SoundSpec | None:
    """The tower in a `config.json`; None if there is no encoder of sounds. `out_size`: hidden size
    of the decoder. Raises UnsupportedModel."""
    audio = section(config, "audio_config")
    if not audio:
        return None
    require(audio, "hidden_act", "silu")
    require(audio, "attention_context_right", 0)
    require_no_clipping(audio)
    channels = channels_of(audio, "subsampling_conv_channels", step=4)
    # As large as transformers' table of distances: half of what a block of queries reads.
    past = size(audio, "attention_context_left", 13) - 1
    last = (size(audio, "attention_chunk_size", 12) + past) // 2
    if not 0 < past <= min(last, MAX_REACH):
        raise UnsupportedModel(
            f"audio_config has an attention_context_left of {past + 1}; 2 to "
            f"{min(last, MAX_REACH) + 1} are supported with its attention_chunk_size"
        )
    spec = Gemma4SoundSpec(
        num_bands=channels[0],
        channels=channels,
        hidden_size=size(audio, "hidden_size", 1_024),
        num_layers=size(audio, "num_hidden_layers", 12, most=MAX_LAYERS),
        num_heads=size(audio, "num_attention_heads", 8),
        kernel=size(audio, "conv_kernel_size", 5),
        reach=past,
        first_position=last - past,
        key_scale=KEY_SCALE,
        score_cap=number(audio, "attention_logit_cap", 50.0, above=0.0),
        residual_scale=number(audio, "residual_weight", 0.5, above=0.0),
        is_limited=get(audio, "use_clipped_linears", bool, True),
        # This key is only in weft's own config.json (GGUF files, `gemma4_file.py`).
        scales_are_final=get(audio, "scales_are_final", bool, False),
        norm_eps=number(audio, "rms_norm_eps", 1e-6, low=0.0),
        last_size=size(audio, "output_proj_dims", 1_536),
        out_size=out_size,
    )
    if spec.hidden_size % (2 * spec.num_heads):
        raise UnsupportedModel(
            f"audio_config has {spec.hidden_size} numbers for {spec.num_heads} heads: each must "
            "have as many, an even number"
        )
    return spec


def gemma4_towers(config: Mapping[str, Any], out_size: int) -> TowerSpec | None:
    """The encoders in a `config.json`; None if there are none. Raises UnsupportedModel."""
    pictures = gemma4(config, out_size)
    sounds = gemma4_sound(config, out_size)
    return joined(pictures, sounds)

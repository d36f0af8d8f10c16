"""Whisper's encoder of sounds, whose vectors are stacked: some that follow each other become one
token of the decoder. Voxtral has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, require, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.sound import WhisperSpec, check_heads, check_positions


@dataclass(frozen=True, kw_only=True)
class StackedSpec:
    """The encoder reads all of a window, with the silence after the sound. Two products with GELU
    between them make a token of each stack of its vectors."""

    encoder: WhisperSpec  # `out_size`: 0, because its own vectors are not projected
    stack: int  # vectors of a token
    inner_size: int  # of the two products
    out_size: int  # hidden size of the decoder
    kinds = ("audio",)
    rules = MediaRules()
    unread = ()

    @property
    def num_tokens(self) -> int:
        """Of a window."""
        return self.encoder.num_positions // self.stack

    @property
    def stacked_size(self) -> int:
        return self.stack * self.encoder.hidden_size

    @property
    def num_parameters(self) -> int:
        of_products = self.inner_size * (self.stacked_size + self.out_size)
        return self.encoder.num_parameters + of_products

    @property
    def num_work_floats(self) -> int:
        of_token = self.stacked_size + self.inner_size + self.out_size
        return self.encoder.num_work_floats + self.num_tokens * of_token

    @property
    def shown_name(self) -> str:
        return self.encoder.shown_name


def voxtral(config: Mapping[str, Any], out_size: int) -> StackedSpec:
    """The tower in a `config.json`. `out_size`: hidden size of the decoder. Raises
    UnsupportedModel."""
    require(config, "projector_hidden_act", "gelu")
    audio = section(config, "audio_config")
    require(audio, "scale_embedding", False)
    require(audio, "activation_function", "gelu")
    encoder = WhisperSpec(
        num_bands=size(audio, "num_mel_bins", 128),
        hidden_size=size(audio, "hidden_size", 1_280),
        inner_size=size(audio, "intermediate_size", 5_120),
        num_layers=size(audio, "num_hidden_layers", 32, most=MAX_LAYERS),
        num_heads=size(audio, "num_attention_heads", 20),
        num_positions=size(audio, "max_source_positions", 1_500),
        out_size=0,
    )
    check_heads(encoder, "audio_config")
    check_positions(encoder)
    # As many vectors as the inner vector of its layers has room for.
    stack, rest = divmod(encoder.inner_size, encoder.hidden_size)
    if rest or encoder.num_positions % stack:
        raise UnsupportedModel(
            f"audio_config: a token is made of {encoder.inner_size:,} numbers of vectors of "
            f"{encoder.hidden_size:,}, of which a window has {encoder.num_positions:,}: they do "
            "not divide each other"
        )
    return StackedSpec(encoder=encoder, stack=stack, inner_size=out_size, out_size=out_size)

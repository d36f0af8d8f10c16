"""Whisper's encoder of sounds: in Whisper itself, where matrices make keys and values of its output
for every layer of the decoder, and in Qwen2-Audio, where a matrix makes the decoder's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, require, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel

KERNEL = 3  # frames that a convolution reads together
MAX_POSITIONS = 4_096  # the kernels keep a weight of each on the stack


@dataclass(frozen=True, kw_only=True)
class WhisperSpec:
    """An encoder of a mel spectrogram. Two convolutions come first, the second of which halves the
    number of frames; after the layers, each pair of vectors becomes its mean."""

    num_bands: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_positions: int  # positions of the longest sound, after the convolutions
    activation: str = "gelu"
    out_size: int  # numbers of an output vector: in Qwen2-Audio, the hidden size of the decoder
    norm_eps: float = 1e-5
    kinds = ("audio",)
    rules = MediaRules()
    unread = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        of_layer = 4 * hidden**2 + 2 * hidden * self.inner_size
        of_input = KERNEL * (self.num_bands + hidden) + self.num_positions
        return self.num_layers * of_layer + hidden * (of_input + self.out_size)

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention, and the frames of both convolutions.
        of_position = 6 * self.hidden_size + self.inner_size
        of_position += KERNEL * (2 * self.num_bands + self.hidden_size) + 2 * self.hidden_size
        return self.num_positions * of_position

    @property
    def shown_name(self) -> str:
        seconds = self.num_positions / 50
        return f"Whisper of {self.num_layers} layers for sounds of up to {seconds:g} s"


@dataclass(frozen=True, kw_only=True)
class SpeechSpec:
    """Whisper's encoder, and the matrices that make keys and values of its output for each of the
    decoder's layers."""

    encoder: WhisperSpec  # `out_size`: keys and values of all layers
    num_layers: int  # of the decoder
    kinds = ("audio",)
    unread = ()

    @property
    def rules(self) -> MediaRules:
        encoder = self.encoder
        return MediaRules(
            heard_len=encoder.num_positions,
            heard_shape=(encoder.num_bands, 2 * encoder.num_positions),
        )

    @property
    def num_parameters(self) -> int:
        return self.encoder.num_parameters

    @property
    def num_work_floats(self) -> int:
        return self.encoder.num_work_floats + self.encoder.num_positions * self.encoder.out_size

    @property
    def shown_name(self) -> str:
        return self.encoder.shown_name


def whisper(config: Mapping[str, Any], hidden_size: int) -> SpeechSpec:
    """The encoder in Whisper's own `config.json`. Raises UnsupportedModel."""
    require(config, "scale_embedding", False)
    require(config, "activation_function", "gelu")
    num_layers = size(config, "decoder_layers", 4, most=MAX_LAYERS)
    encoder = WhisperSpec(
        num_bands=size(config, "num_mel_bins", 80),
        hidden_size=hidden_size,
        inner_size=size(config, "encoder_ffn_dim", 1_536),
        num_layers=size(config, "encoder_layers", 4, most=MAX_LAYERS),
        num_heads=size(config, "encoder_attention_heads", 6),
        num_positions=size(config, "max_source_positions", 1_500),
        out_size=2 * num_layers * hidden_size,
    )
    check_heads(encoder, "the encoder")
    check_positions(encoder)
    return SpeechSpec(encoder=encoder, num_layers=num_layers)


def check_positions(spec: WhisperSpec) -> None:
    """Raise UnsupportedModel if a window has too many."""
    if spec.num_positions > MAX_POSITIONS:
        raise UnsupportedModel(
            f"max_source_positions is {spec.num_positions:,}; at most {MAX_POSITIONS:,} are "
            "supported"
        )


def check_heads(spec: WhisperSpec, name: str) -> None:
    """Raise UnsupportedModel unless heads divide a vector into even parts."""
    if spec.hidden_size % spec.num_heads or spec.head_dim % 2:
        raise UnsupportedModel(
            f"{name} has {spec.hidden_size} numbers for {spec.num_heads} heads: each must "
            "have as many, an even number"
        )


def qwen2_audio(config: Mapping[str, Any], out_size: int) -> WhisperSpec:
    """The tower in a `config.json`. `out_size`: hidden size of the decoder. Raises
    UnsupportedModel."""
    encoder = section(config, "audio_config")
    require(encoder, "scale_embedding", False)
    require(encoder, "activation_function", "gelu")
    spec = WhisperSpec(
        num_bands=size(encoder, "num_mel_bins", 128),
        hidden_size=size(encoder, "d_model", 1_280),
        inner_size=size(encoder, "encoder_ffn_dim", 5_120),
        num_layers=size(encoder, "encoder_layers", 32, most=MAX_LAYERS),
        num_heads=size(encoder, "encoder_attention_heads", 20),
        num_positions=size(encoder, "max_source_positions", 1_500),
        out_size=out_size,
    )
    check_heads(spec, "audio_config")
    return spec

"""The encoders of Gemma 3n. A picture becomes a square of vectors (`mobilenet.py`). A sound becomes
a vector for each 16 frames (`conformer.py`); a learnt vector fills up the number of tokens that all
sounds have.

The vectors are normed, multiplied by a matrix and normed again. So are the embeddings of the tokens
for pictures and sounds, which follow the vocabulary of the text: the token that ends a picture or a
sound is one of them, and its vector comes with those of the picture or sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.conformer import (
    MAX_REACH,
    ConformerSpec,
    channels_of,
    require_no_clipping,
)
from weft.config.vision.joint import joined
from weft.config.vision.mobilenet import MobileNetSpec, mobilenet
from weft.config.vision.spec import TowerSpec
from weft.json_types import JsonMapping

PICTURES = "vision_tower.timm_model"
SOUNDS = "audio_tower"
TEXT_VOCAB = 262_400
LAYER_VOCAB = 262_144  # tokens with vectors of their own for each layer
MAX_VOCAB = 4_096
MAX_TOKENS = 4_096


@dataclass(frozen=True, kw_only=True)
class SpecialVocab:
    """The embeddings of the tokens for pictures, or for sounds."""

    num_tokens: int
    end: int | None  # row of the token that ends a picture or sound; None: it is one of the text
    filling: int | None = None  # row of the token after the vectors of a sound


@dataclass(frozen=True, kw_only=True)
class Gemma3nPictureSpec:
    net: MobileNetSpec
    out_size: int  # hidden size of the decoder
    norm_eps: float
    vocab: SpecialVocab
    kinds = ("image",)
    rules = MediaRules()
    unread = ()

    @property
    def num_vectors(self) -> int:
        return self.net.out_side**2 + (self.vocab.end is not None)

    @property
    def num_parameters(self) -> int:
        outer = self.net.out_size * (self.vocab.num_tokens + self.out_size)
        return self.net.num_parameters + outer

    @property
    def num_work_floats(self) -> int:
        return self.net.num_work_floats

    @property
    def shown_name(self) -> str:
        num_blocks = sum(map(len, self.net.levels))
        return f"MobileNetV5 of {num_blocks} blocks, {self.net.out_side**2} tokens for a picture"


@dataclass(frozen=True, kw_only=True)
class Gemma3nSoundSpec(ConformerSpec):
    conv_eps: float  # of the norms after convolutions
    step: int  # vectors of the layers of which one is taken
    num_tokens: int  # of all sounds
    vocab: SpecialVocab

    @property
    def num_vectors(self) -> int:
        return self.num_tokens + (self.vocab.end is not None)

    @property
    def num_parameters(self) -> int:
        return self.num_conformer_parameters + self.hidden_size * (
            self.vocab.num_tokens + self.out_size
        )

    @property
    def num_work_floats(self) -> int:
        return self.num_work_floats_of(self.step * self.num_tokens)

    @property
    def shown_name(self) -> str:
        return (
            f"Gemma 3n's encoder of sounds of {self.num_layers} layers, {self.num_tokens} tokens "
            "for a sound"
        )

    @property
    def max_frames(self) -> int:
        return 4 * self.step * self.num_tokens

    def num_heard(self, num_frames: int) -> int:
        """The vectors of so many frames."""
        halved = (num_frames - 1) // 2 + 1
        quartered = (halved - 1) // 2 + 1
        return -(-quartered // self.step)


def gemma3n_towers(config: Mapping[str, Any], out_size: int) -> TowerSpec | None:
    """The encoders in a `config.json`; None if there are none. `out_size`: hidden size of the
    decoder. Raises UnsupportedModel."""
    pictures = gemma3n_pictures(config, out_size)
    sounds = gemma3n_sounds(config, out_size)
    if pictures is None and sounds is None:
        return None
    # This key is only in weft's own config.json (GGUF files, `gemma3n_file.py`).
    if not get(config, "has_padded_layer_inputs", bool, False):
        _require_beyond_text(config)
    return joined(pictures, sounds)


def gemma3n_pictures(config: Mapping[str, Any], out_size: int) -> Gemma3nPictureSpec | None:
    """The encoder of pictures; None: there is none."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    net = mobilenet(vision, size(vision, "hidden_size", 2_048))
    num_tokens = size(config, "vision_soft_tokens_per_image", 256)
    if num_tokens != net.out_side**2:
        raise UnsupportedModel(
            f"vision_soft_tokens_per_image is {num_tokens}; the encoder makes "
            f"{net.out_side} x {net.out_side} vectors"
        )
    offset = get(vision, "vocab_offset", int, LAYER_VOCAB)
    end = get(config, "eoi_token_id", int, LAYER_VOCAB)
    vocab_size = _vocab_size(vision)
    return Gemma3nPictureSpec(
        net=net,
        out_size=out_size,
        norm_eps=number(vision, "rms_norm_eps", 1e-6, low=0.0),
        vocab=SpecialVocab(
            num_tokens=vocab_size,
            end=_row(end - offset, vocab_size),
        ),
    )


def gemma3n_sounds(config: Mapping[str, Any], out_size: int) -> Gemma3nSoundSpec | None:
    """The encoder of sounds; None: there is none."""
    audio = section(config, "audio_config")
    if not audio:
        return None
    require(audio, "conf_attention_context_right", 0)
    require(audio, "sscp_conv_kernel_size", [[3, 3], [3, 3]])
    require(audio, "sscp_conv_stride_size", [[2, 2], [2, 2]])
    require_no_clipping(audio)
    reach = size(audio, "conf_attention_context_left", 13)
    hidden = size(audio, "hidden_size", 1_536)
    num_heads = size(audio, "conf_num_attention_heads", 8)
    num_bands = size(audio, "input_feat_size", 128)
    if reach > MAX_REACH or hidden % (2 * num_heads) or num_bands % 4:
        raise UnsupportedModel(
            f"audio_config has {hidden} numbers for {num_heads} heads that see {reach} vectors, "
            f"and {num_bands} bands: each head must have as many numbers, an even number, see at "
            f"most {MAX_REACH} vectors, and bands must be a multiple of 4"
        )
    offset = get(audio, "vocab_offset", int, LAYER_VOCAB + 128)
    end = get(config, "eoa_token_id", int, LAYER_VOCAB + 128)
    vocab_size = _vocab_size(audio)
    filling = _row(_text_vocab(config) - 1 - offset, vocab_size)
    if filling is None:
        raise UnsupportedModel(
            f"audio_config has {vocab_size} tokens from {offset:,} on, of which the last token of "
            "the vocabulary is none"
        )
    num_tokens = size(config, "audio_soft_tokens_per_image", 188)
    if num_tokens > MAX_TOKENS:
        raise UnsupportedModel(
            f"audio_soft_tokens_per_image is {num_tokens:,}; at most {MAX_TOKENS:,} are supported"
        )
    return Gemma3nSoundSpec(
        num_bands=num_bands,
        channels=channels_of(audio, "sscp_conv_channel_size"),
        hidden_size=hidden,
        num_layers=size(audio, "conf_num_hidden_layers", 12, most=MAX_LAYERS),
        num_heads=num_heads,
        kernel=size(audio, "conf_conv_kernel_size", 5),
        reach=reach,
        score_cap=number(audio, "conf_attention_logit_cap", 50.0, above=0.0),
        residual_scale=number(audio, "conf_residual_weight", 0.5, above=0.0),
        norm_eps=number(audio, "rms_norm_eps", 1e-6, low=0.0),
        conv_eps=number(audio, "sscp_conv_group_norm_eps", 1e-3, low=0.0),
        step=size(audio, "conf_reduction_factor", 4),
        num_tokens=num_tokens,
        out_size=out_size,
        vocab=SpecialVocab(
            num_tokens=vocab_size,
            end=_row(end - offset, vocab_size),
            filling=filling,
        ),
    )


def _text_vocab(config: JsonMapping) -> int:
    # A GGUF file's keys for the text are not in a section of their own.
    text = section(config, "text_config")
    both = {**config, **text}
    return size(both, "vocab_size", TEXT_VOCAB)


def _vocab_size(section: JsonMapping) -> int:
    value = size(section, "vocab_size", 128)
    if value > MAX_VOCAB:
        raise UnsupportedModel(
            f"the vocab_size of an encoder is {value:,}; at most {MAX_VOCAB:,} are supported"
        )
    return value


def _row(index: int, num_rows: int) -> int | None:
    return index if 0 <= index < num_rows else None


def _require_beyond_text(config: JsonMapping) -> None:
    """Raise UnsupportedModel unless the tokens of pictures and sounds have no vectors of their own
    for each layer, as in the release."""
    both = {**config, **section(config, "text_config")}
    num_rows = size(both, "vocab_size_per_layer_input", LAYER_VOCAB)
    for key, usual in (("image_token_id", 262_145), ("audio_token_id", 262_273)):
        token = get(config, key, int, usual)
        if token < num_rows:
            raise UnsupportedModel(
                f"{key} is {token:,}; it must be at least {num_rows:,} (vocab_size_per_layer_input)"
            )

"""The towers of Gemma 3, of Idefics 3 and SmolVLM, and of LLaVA: an encoder of patches, and a
projector that makes the decoder's tokens of its output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import get, require, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import BadConfig, UnsupportedModel
from weft.config.vision.pixtral import PixtralSpec, read_pixtral
from weft.config.vision.vit import VitSpec, activation, read_clip, read_siglip

Config = Mapping[str, Any]  # a `config.json`


@dataclass(frozen=True, kw_only=True)
class PictureSpec:
    """The fields that all towers of this module share."""

    encoder: VitSpec
    encoder_name: str  # name of its tensors, within the base model
    out_size: int  # hidden size of the decoder
    num_tokens: int  # tokens per picture or tile
    kinds = ("image",)

    @property
    def rules(self) -> MediaRules:
        return MediaRules()

    @property
    def num_parameters(self) -> int:
        return self.encoder.num_parameters + self._num_projector_parameters

    @property
    def num_work_floats(self) -> int:
        return self.encoder.num_work_floats

    @property
    def unread(self) -> tuple[str, ...]:
        return self.encoder.unread(self.encoder_name)

    @property
    def shown_name(self) -> str:
        return f"{self.encoder.shown_name}, {self.num_tokens} tokens"

    @property
    def _num_projector_parameters(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PooledSpec(PictureSpec):
    """Gemma 3: each square of patches becomes its mean, which is normed and multiplied by a
    matrix."""

    norm_is_whole: bool = False  # the norm's weights have their 1, as in GGUF files

    @property
    def rules(self) -> MediaRules:
        return MediaRules(sees_both_ways=True, longest_unsplit=self.num_tokens)

    @property
    def pool(self) -> int:
        """Patches per side of such a square."""
        return self.encoder.side // math.isqrt(self.num_tokens)

    @property
    def _num_projector_parameters(self) -> int:
        return self.encoder.hidden_size * self.out_size


@dataclass(frozen=True, kw_only=True)
class ShuffledSpec(PictureSpec):
    """Idefics 3 and SmolVLM: the patches of each square are concatenated to one vector, which is
    multiplied by a matrix."""

    shuffle: int  # patches per side of such a square

    @property
    def _num_projector_parameters(self) -> int:
        return self.shuffle**2 * self.encoder.hidden_size * self.out_size


@dataclass(frozen=True, kw_only=True)
class PerceptronSpec(PictureSpec):
    """LLaVA: two matrices with an activation between them."""

    activation: str
    has_bias: bool

    @property
    def _num_projector_parameters(self) -> int:
        return (self.encoder.hidden_size + self.out_size) * self.out_size


def gemma3(config: Config, out_size: int) -> PooledSpec | None:
    """The tower in a `config.json`; None if there is no encoder. `out_size`: hidden size of the
    decoder. Raises UnsupportedModel."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    encoder = read_siglip(vision)
    num_tokens = size(config, "mm_tokens_per_image", 256)
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens or encoder.side % side:
        raise BadConfig(
            f"mm_tokens_per_image is {num_tokens}; a picture has {encoder.side} x {encoder.side} "
            "patches, which must be cut into so many squares"
        )
    return PooledSpec(
        encoder=encoder,
        encoder_name="vision_tower",
        out_size=out_size,
        num_tokens=num_tokens,
        norm_is_whole=get(vision, "norm_weights_are_whole", bool, False),
    )


def idefics3(config: Config, out_size: int) -> ShuffledSpec | None:
    """Like `gemma3`."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    defaults = {"hidden_size": 1_152, "num_attention_heads": 16, "patch_size": 32}
    encoder = read_siglip({**defaults, **vision})
    shuffle = size(config, "scale_factor", 2)
    if encoder.side % shuffle:
        raise BadConfig(
            f"scale_factor is {shuffle}; a picture has {encoder.side} x {encoder.side} patches, "
            "which must be a multiple of it"
        )
    return ShuffledSpec(
        encoder=encoder,
        encoder_name="vision_model",
        out_size=out_size,
        num_tokens=encoder.num_patches // shuffle**2,
        shuffle=shuffle,
    )


def llava(config: Config, out_size: int) -> PerceptronSpec | PixtralSpec | None:
    """Like `gemma3`."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    has_bias = get(config, "multimodal_projector_bias", bool, True)
    if vision.get("model_type") == "pixtral":
        require(config, "vision_feature_select_strategy", "full")
        return read_pixtral(config, out_size, projector_bias=has_bias)
    layer = get(config, "vision_feature_layer", int, -2)
    kind = get(vision, "model_type", str, "clip_vision_model")
    if kind == "clip_vision_model":
        encoder = read_clip(vision, layer=layer)
        require(config, "vision_feature_select_strategy", "default")
    elif kind == "siglip_vision_model":
        encoder = read_siglip(vision, layer=layer)
        require(config, "vision_feature_select_strategy", "full")
    else:
        raise UnsupportedModel(
            f"the vision model {kind[:64]!r} is not supported in LLaVA; supported are "
            "'clip_vision_model', 'siglip_vision_model' and 'pixtral'"
        )
    return PerceptronSpec(
        encoder=encoder,
        encoder_name="vision_tower",
        out_size=out_size,
        num_tokens=encoder.num_patches,
        activation=activation(config, "projector_hidden_act", "gelu"),
        has_bias=has_bias,
    )

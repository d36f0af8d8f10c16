"""The layers of an encoder of sounds after USM, a conformer: each has attention to the vectors just
before, by distance, and a convolution, between two feed-forward parts. Source: arXiv:2303.01037
(USM)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.config_json import get, number
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping

MAX_REACH = 256
MAX_CHANNELS = 4_096
MIN_CLIPPING = 1e9  # lower bounds of activations are not computed


@dataclass(frozen=True, kw_only=True)
class ConformerSpec:
    """The layers, and the two convolutions before them: together a sound's encoder but for what
    differs between models."""

    num_bands: int
    channels: tuple[int, int]  # outputs of the two convolutions
    hidden_size: int
    num_layers: int
    num_heads: int
    kernel: int  # vectors that the convolution of a layer reads together
    reach: int  # vectors that a vector attends to, with itself
    first_position: int = 0  # position of the distance 0
    key_scale: float = 1.0
    score_cap: float
    residual_scale: float  # factor of the feed-forward parts
    is_limited: bool = False  # products have limits of their inputs and outputs
    scales_are_final: bool = False  # of the numbers of a head; else softplus makes them
    norm_eps: float
    out_size: int  # hidden size of the decoder
    kinds = ("audio",)
    rules = MediaRules()
    unread = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def inner_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def folded_size(self) -> int:
        """Outputs of the second convolution for a vector."""
        return self.num_bands // 4 * self.channels[1]

    @property
    def num_conformer_parameters(self) -> int:
        """Of the convolutions, the layers, and what is between them."""
        hidden = self.hidden_size
        # Queries, keys, values, outputs and distances; two feed-forward parts; around convolutions.
        of_layer = (5 + 16 + 3) * hidden**2 + self.kernel * hidden
        first, second = self.channels
        outer = 9 * (first + first * second) + self.folded_size * hidden
        return self.num_layers * of_layer + outer

    def num_work_floats_of(self, num_vectors: int) -> int:
        """While a sound of so many vectors within the encoder is encoded."""
        # The first convolution, its norm, and what it reads for each output; then x and its parts.
        of_frame_pair = self.num_bands // 2 * (2 * self.channels[0] + 9)
        of_vector = (2 * self.reach + 12) * self.hidden_size
        return num_vectors * (2 * of_frame_pair + of_vector)


def require_no_clipping(audio: JsonMapping) -> None:
    """Raise UnsupportedModel if an `audio_config` limits activations to what they may reach."""
    clipping = number(audio, "gradient_clipping", 1e10, low=0.0)
    if clipping < MIN_CLIPPING:
        raise UnsupportedModel(
            f"audio_config has a gradient_clipping of {clipping:g}; at least {MIN_CLIPPING:g} is "
            "supported"
        )


def channels_of(audio: JsonMapping, key: str, *, step: int = 1) -> tuple[int, int]:
    """The outputs of the two convolutions in an `audio_config`, the first a multiple of `step`.
    Raises UnsupportedModel."""
    found = get(audio, key, list, [128, 32])
    are_counts = all(type(one) is int and 0 < one <= MAX_CHANNELS for one in found)
    if len(found) != 2 or not are_counts or found[0] % step:
        multiple = f", the first a multiple of {step}" if step > 1 else ""
        raise UnsupportedModel(
            f"audio_config has the {key} {str(found)[:64]}; two numbers up to {MAX_CHANNELS:,} are "
            f"supported{multiple}"
        )
    return found[0], found[1]

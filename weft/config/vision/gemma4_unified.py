"""What the unified Gemma 4 has instead of encoders: patches of a picture, and pieces of a waveform,
become tokens by norms and products alone. Patches have learnt positions by column and by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import get, number, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.gemma4 import USUAL_BUDGET, picture_rules
from weft.config.vision.gemma4_sound import MAX_TOKENS
from weft.config.vision.joint import joined
from weft.config.vision.spec import TowerSpec
from weft.json_types import JsonMapping

MAX_SAMPLES = 1 << 16  # of a token


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """The pictures."""

    patch_size: int  # pixels per side
    pool: int  # patches per side of a token
    hidden_size: int  # numbers of a patch with its position
    num_places: int  # rows, and columns, that have a learnt position
    out_size: int  # hidden size of the decoder
    norm_eps: float  # of the norm before the last product
    sees_both_ways: bool  # as in `Gemma4TowerSpec`
    # The order of a GGUF file: patches colour by colour, and the positions of all columns before
    # those of rows.
    is_by_colour: bool
    kinds = ("image",)
    unread = ()

    @property
    def rules(self) -> MediaRules:
        return picture_rules(sees_both_ways=self.sees_both_ways)

    @property
    def token_side(self) -> int:
        """Pixels per side of a token."""
        return self.patch_size * self.pool

    @property
    def patch_values(self) -> int:
        """Values of a token."""
        return 3 * self.token_side**2

    @property
    def num_parameters(self) -> int:
        outer = self.patch_values + 2 * self.num_places + self.out_size
        return self.hidden_size * outer

    @property
    def num_work_floats(self) -> int:
        # Patches with their copy and their norm; then x and its parts.
        of_token = 3 * self.patch_values
        of_token += 5 * self.hidden_size + self.out_size
        return USUAL_BUDGET * of_token

    @property
    def shown_name(self) -> str:
        side = self.token_side
        return f"products of pixels, a token for {side} x {side}"


@dataclass(frozen=True, kw_only=True)
class WaveSpec:
    """The sounds."""

    num_samples: int  # of a token
    out_size: int
    norm_eps: float
    kinds = ("audio",)
    rules = MediaRules()
    unread = ()

    @property
    def num_parameters(self) -> int:
        return self.num_samples * self.out_size

    @property
    def num_work_floats(self) -> int:
        return MAX_TOKENS * (3 * self.num_samples + self.out_size)

    @property
    def shown_name(self) -> str:
        return f"a product of samples, a token for {self.num_samples}"


def gemma4_unified(config: Mapping[str, Any], out_size: int) -> TowerSpec | None:
    """Both in a `config.json`; None: there are none. `out_size`: hidden size of the decoder. Raises
    UnsupportedModel."""
    pictures = _patches(config, out_size)
    sounds = _waves(config, out_size)
    return joined(pictures, sounds)


def _patches(config: JsonMapping, out_size: int) -> PatchSpec | None:
    vision = section(config, "vision_config")
    if not vision:
        return None
    # With nulls: one says that pictures are seen in order.
    text = get(config, "text_config", dict, {})
    hidden = size(vision, "mm_embed_dim", 3_840)
    made = size(vision, "output_proj_dims", hidden)
    if made != hidden:
        raise UnsupportedModel(
            f"vision_config has {hidden} numbers for a patch, and {made} before the last product; "
            "as many of both are supported"
        )
    return PatchSpec(
        patch_size=size(vision, "patch_size", 16),
        pool=size(vision, "pooling_kernel_size", 3),
        hidden_size=hidden,
        num_places=size(vision, "mm_posemb_size", 1_120),
        out_size=out_size,
        norm_eps=number(vision, "rms_norm_eps", 1e-6, low=0.0),
        sees_both_ways=text.get("use_bidirectional_attention", "vision") == "vision",
        # This key is only in weft's own config.json (GGUF files, `gemma4_unified_file.py`).
        is_by_colour=get(vision, "is_by_colour", bool, False),
    )


def _waves(config: JsonMapping, out_size: int) -> WaveSpec | None:
    audio = section(config, "audio_config")
    if not audio:
        return None
    num_samples = size(audio, "audio_embed_dim", 640)
    made = size(audio, "output_proj_dims", num_samples)
    if made != num_samples or num_samples > MAX_SAMPLES:
        raise UnsupportedModel(
            f"audio_config has {num_samples:,} samples for a token, and {made:,} before the "
            f"product; as many of both, up to {MAX_SAMPLES:,}, are supported"
        )
    return WaveSpec(
        num_samples=num_samples,
        out_size=out_size,
        norm_eps=number(audio, "rms_norm_eps", 1e-6, low=0.0),
    )

"""The tower of Gemma 4: an encoder of pictures of any size, whose patches have learnt positions by
column and by row, and are rotated by both. Each square of patches becomes its mean, which is normed
and multiplied by a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, rope_theta, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.qwen import MAX_HEAD_DIM

GELU = "gelu_pytorch_tanh"
TOWER = "vision_tower"
LIMITS = ("input_min", "input_max", "output_min", "output_max")
BUDGETS = (70, 140, 280, 560, 1_120)  # most tokens of a picture, as the model was trained
USUAL_BUDGET = 280


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerSpec:
    hidden_size: int
    inner_size: int
    out_size: int  # hidden size of the decoder
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int  # pixels per side
    pool: int  # patches per side of the square that becomes a token
    num_places: int  # rows, and columns, that have a learnt position
    theta: float  # base of the rotation
    norm_eps: float
    # Products have limits of their inputs and outputs, which a checkpoint has.
    is_limited: bool
    is_standardized: bool  # tokens are shifted and scaled before they are normed
    sees_both_ways: bool  # tokens of a picture see each other, in the decoder's layers with windows
    kinds = ("image",)
    unread = ()

    @property
    def rules(self) -> MediaRules:
        return picture_rules(sees_both_ways=self.sees_both_ways)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.patch_size**2

    @property
    def token_side(self) -> int:
        """Pixels per side of the square that becomes a token."""
        return self.patch_size * self.pool

    @property
    def attention_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        of_layer = 4 * hidden * self.attention_size + 3 * hidden * self.inner_size
        outer = self.patch_values + 2 * self.num_places + self.out_size
        return self.num_layers * of_layer + hidden * outer

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention, of which some are kept with limits, too;
        # patches twice, because they are copied.
        of_patch = 4 * self.hidden_size + 6 * self.attention_size
        of_patch += 3 * self.inner_size + 3 * self.patch_values
        return USUAL_BUDGET * self.pool**2 * of_patch

    @property
    def shown_name(self) -> str:
        pixels = f"{self.token_side} x {self.token_side} pixels"
        return f"Gemma 4's encoder of {self.num_layers} layers, a token for {pixels}"


def picture_rules(*, sees_both_ways: bool) -> MediaRules:
    """`sees_both_ways`: as in the spec."""
    if not sees_both_ways:
        return MediaRules()
    return MediaRules(sees_both_ways=True, longest_unsplit=BUDGETS[-1])


def gemma4(config: Mapping[str, Any], out_size: int) -> Gemma4TowerSpec | None:
    """The tower in a `config.json`; None if there is no encoder. `out_size`: hidden size of the
    decoder. Raises UnsupportedModel."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    require(vision, "hidden_activation", GELU)
    require(vision, "attention_bias", False)
    rope = section(vision, "rope_parameters")
    require(rope, "rope_type", "axial", "default")
    num_heads = size(vision, "num_attention_heads", 12)
    # The default of transformers is 12, whatever the number of heads.
    if size(vision, "num_key_value_heads", 12) != num_heads:
        raise UnsupportedModel(
            f"vision_config has {num_heads} heads with {size(vision, 'num_key_value_heads', 12)} "
            "KV heads; as many of both are supported"
        )
    head_dim = size(vision, "head_dim", 64)
    if head_dim % 4 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"vision_config has a head_dim of {head_dim}; a multiple of 4 up to {MAX_HEAD_DIM} is "
            "supported"
        )
    text = section(config, "text_config")
    return Gemma4TowerSpec(
        hidden_size=size(vision, "hidden_size", 768),
        inner_size=size(vision, "intermediate_size", 3_072),
        out_size=out_size,
        num_layers=size(vision, "num_hidden_layers", 16, most=MAX_LAYERS),
        num_heads=num_heads,
        head_dim=head_dim,
        patch_size=size(vision, "patch_size", 16),
        pool=size(vision, "pooling_kernel_size", 3),
        num_places=size(vision, "position_embedding_size", 10_240),
        theta=rope_theta(rope, 100.0),
        norm_eps=number(vision, "rms_norm_eps", 1e-6, low=0.0),
        is_limited=get(vision, "use_clipped_linears", bool, False),
        is_standardized=get(vision, "standardize", bool, False),
        sees_both_ways=text.get("use_bidirectional_attention") == "vision",
    )

"""The tower of Llama 4: an encoder of tiles of one size, whose patches are rotated by row and
column and have learnt positions, too; the patches of a square become one vector, of which two
matrices and a projection make a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, number, require, rope_theta, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import BadConfig, UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Llama4TowerSpec:
    hidden_size: int
    inner_size: int
    adapter_size: int  # values of a square after each of the two matrices
    out_size: int  # hidden size of the decoder
    num_layers: int
    num_heads: int
    image_size: int  # pixels per side of a tile
    patch_size: int  # pixels per side
    shuffle: int  # patches per side of the square that becomes a token
    theta: float  # base of the rotation by row and column
    kinds = ("image",)
    rules = MediaRules()
    unread = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Patches per side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Of a tile."""
        return int((self.side // self.shuffle) ** 2)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.patch_size**2

    @property
    def square_values(self) -> int:
        """Values of a square."""
        return self.hidden_size * self.shuffle**2

    @property
    def num_rows(self) -> int:
        """The patches of a tile, and the class token."""
        return int(self.side**2 + 1)

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        of_layer = 4 * hidden**2 + 2 * hidden * self.inner_size
        of_adapter = (self.square_values + self.adapter_size) * self.adapter_size
        of_projection = self.adapter_size * self.out_size
        outer = hidden * (self.patch_values + self.num_rows)
        return self.num_layers * of_layer + of_adapter + of_projection + outer

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention; patches twice, because they are copied.
        of_patch = 6 * self.hidden_size + self.inner_size + 3 * self.patch_values
        return self.num_rows * of_patch

    @property
    def shown_name(self) -> str:
        pixels = f"{self.image_size} x {self.image_size} pixels"
        return f"Llama 4's of {self.num_layers} layers, {self.num_tokens} tokens for {pixels}"


def llama4(config: Mapping[str, Any], out_size: int) -> Llama4TowerSpec | None:
    """The tower in a `config.json`; None if there is no encoder. `out_size`: hidden size of the
    decoder. Raises UnsupportedModel."""
    vision = section(config, "vision_config")
    if not vision:
        return None
    require(vision, "num_channels", 3)
    require(vision, "hidden_act", "gelu")
    require(vision, "multi_modal_projector_bias", False)
    rope = section(vision, "rope_parameters")
    require(rope, "rope_type", "default")
    adapter_size = size(vision, "projector_output_dim", 4_096)
    require(vision, "projector_input_dim", adapter_size)
    require(vision, "vision_output_dim", adapter_size)
    ratio = number(vision, "pixel_shuffle_ratio", 0.5, above=0.0)
    spec = Llama4TowerSpec(
        hidden_size=size(vision, "hidden_size", 768),
        inner_size=size(vision, "intermediate_size", 5_632),
        adapter_size=adapter_size,
        out_size=out_size,
        num_layers=size(vision, "num_hidden_layers", 34, most=MAX_LAYERS),
        num_heads=size(vision, "num_attention_heads", 16),
        image_size=size(vision, "image_size", 448),
        patch_size=size(vision, "patch_size", 14),
        shuffle=max(round(1 / ratio), 1),
        theta=rope_theta(rope, rope_theta(vision)),
    )
    if spec.hidden_size % spec.num_heads or spec.head_dim % 4:
        raise UnsupportedModel(
            f"vision_config has {spec.hidden_size} numbers for {spec.num_heads} heads: each must "
            "have as many, a multiple of 4"
        )
    if spec.shuffle * ratio != 1 or spec.side == 0 or spec.side % spec.shuffle:
        raise BadConfig(
            f"pixel_shuffle_ratio is {ratio:g}; a tile has {spec.side} x {spec.side} patches, "
            "which must be cut into squares of 1 / pixel_shuffle_ratio patches per side"
        )
    if spec.inner_size != spec.square_values:
        # transformers gives its first matrix the one size, and a square has the other.
        raise BadConfig(
            f"intermediate_size is {spec.inner_size}; the patches of a square have "
            f"{spec.square_values} values"
        )
    return spec

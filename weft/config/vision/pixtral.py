"""The tower of Pixtral, and of Mistral from Small 3.1 on: an encoder of pictures of any size, in
which only a rotation encodes the positions of patches, and two matrices that make tokens of patches
or of squares of patches. Source: arXiv:2410.07073."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, rope_theta, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import UnsupportedModel
from weft.config.vision.vit import activation, layers_up_to

GATES = ("gelu", "silu", "gelu_pytorch_tanh")  # activations of gates


@dataclass(frozen=True, kw_only=True)
class PixtralSpec:
    hidden_size: int
    inner_size: int
    out_size: int  # hidden size of the decoder
    num_layers: int  # layers that are computed
    num_stored_layers: int  # layers in a checkpoint
    num_heads: int
    patch_size: int  # pixels per side
    usual_side: int  # pixels per side of a large picture, for the reserved memory
    theta: float  # base of the rotation by row and column
    activation: str  # activation of gates
    # Patches per side of the square that becomes a token, by its own norm and matrix; 0: each patch
    # becomes a token, without these.
    merge_size: int
    merge_norm_eps: float
    projector_activation: str
    projector_bias: bool
    kinds = ("image",)
    rules = MediaRules()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.patch_size**2

    @property
    def token_side(self) -> int:
        """Pixels per side of the square that becomes a token."""
        return self.patch_size * max(self.merge_size, 1)

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        of_layer = 4 * hidden**2 + 3 * hidden * self.inner_size
        of_merger = (self.merge_size * hidden) ** 2
        of_projector = (hidden + self.out_size) * self.out_size
        return self.num_layers * of_layer + of_merger + of_projector + hidden * self.patch_values

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention; patches twice, because they are copied.
        of_patch = 6 * self.hidden_size + self.inner_size + 3 * self.patch_values
        num_patches: int = (self.usual_side // self.patch_size) ** 2
        return num_patches * of_patch

    @property
    def unread(self) -> tuple[str, ...]:
        idle = range(self.num_layers, self.num_stored_layers)
        return tuple(f"vision_tower.transformer.layers.{layer}." for layer in idle)

    @property
    def shown_name(self) -> str:
        pixels = f"{self.token_side} x {self.token_side} pixels"
        return f"Pixtral of {self.num_layers} layers, a token for {pixels}"


def mistral3(config: Mapping[str, Any], out_size: int) -> PixtralSpec | None:
    """The tower in a `config.json`; None if there is no encoder. `out_size`: hidden size of the
    decoder. Raises UnsupportedModel."""
    if not section(config, "vision_config"):
        return None
    text = section(config, "text_config")
    return read_pixtral(
        config,
        out_size,
        patch_size=14,
        merge_size=size(config, "spatial_merge_size", 2),
        merge_norm_eps=number(text, "rms_norm_eps", 1e-5, low=0.0),
        projector_bias=get(config, "multimodal_projector_bias", bool, False),
    )


def read_pixtral(
    config: Mapping[str, Any],
    out_size: int,
    *,
    patch_size: int = 16,
    merge_size: int = 0,
    merge_norm_eps: float = 0.0,
    projector_bias: bool,
) -> PixtralSpec:
    """The tower in a `config.json`. `patch_size`: default of a file without it. Raises
    UnsupportedModel."""
    vision = section(config, "vision_config")
    require(vision, "num_channels", 3)
    require(vision, "model_type", "pixtral")
    require(vision, "hidden_act", *GATES)
    rope = section(vision, "rope_parameters")
    require(rope, "rope_type", "axial", "default")
    num_layers = size(vision, "num_hidden_layers", 24, most=MAX_LAYERS)
    num_heads = size(vision, "num_attention_heads", 16)
    hidden = size(vision, "hidden_size", 1_024)
    if hidden % num_heads or hidden // num_heads % 4:
        raise UnsupportedModel(
            f"vision_config has {hidden} numbers for {num_heads} heads: each must have as many, a "
            "multiple of 4"
        )
    require(vision, "head_dim", hidden // num_heads)
    return PixtralSpec(
        hidden_size=hidden,
        inner_size=size(vision, "intermediate_size", 4_096),
        out_size=out_size,
        num_layers=layers_up_to(get(config, "vision_feature_layer", int, -1), num_layers),
        num_stored_layers=num_layers,
        num_heads=num_heads,
        patch_size=size(vision, "patch_size", patch_size),
        usual_side=size(vision, "image_size", 1_024),
        theta=rope_theta(rope, rope_theta(vision)),
        activation=get(vision, "hidden_act", str, "gelu"),
        merge_size=merge_size,
        merge_norm_eps=merge_norm_eps,
        projector_activation=activation(config, "projector_hidden_act", "gelu"),
        projector_bias=projector_bias,
    )

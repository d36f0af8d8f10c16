"""Transformers over the patches of a picture: SigLIP and CLIP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, size
from weft.config.model_errors import BadConfig, UnsupportedModel
from weft.json_types import JsonMapping

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu")


@dataclass(frozen=True, kw_only=True)
class VitSpec:
    """An encoder of square pictures of one size."""

    name: str  # for users: SigLIP, CLIP
    hidden_size: int
    inner_size: int
    num_layers: int  # layers that are computed
    num_stored_layers: int  # layers in a checkpoint
    num_heads: int
    image_size: int  # pixels per side
    patch_size: int
    norm_eps: float
    activation: str
    # CLIP: a learnt token before the patches, a norm before the first layer, no bias of patches.
    has_class_token: bool = False
    has_last_norm: bool = True  # a norm after the last layer

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.side**2

    @property
    def num_positions(self) -> int:
        return self.num_patches + (1 if self.has_class_token else 0)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.patch_size**2

    @property
    def num_parameters(self) -> int:
        of_layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.inner_size
        outer = self.hidden_size * (self.patch_values + self.num_positions)
        return self.num_layers * of_layer + outer

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention; patches twice, because they are copied.
        of_patch = 6 * self.hidden_size + self.inner_size + 3 * self.patch_values
        return self.num_positions * of_patch

    def unread(self, prefix: str) -> tuple[str, ...]:
        """`TowerSpec.unread` for a checkpoint whose encoder has this prefix."""
        names = [f"{prefix}.head."]
        idle = range(self.num_layers, self.num_stored_layers)
        names += [f"{prefix}.encoder.layers.{layer}." for layer in idle]
        if not self.has_last_norm:
            names.append(f"{prefix}.post_layernorm.")
        return tuple(names)

    @property
    def shown_name(self) -> str:
        pixels = f"{self.image_size} x {self.image_size}"
        return f"{self.name} of {self.num_layers} layers for {pixels} pixels"


def read_siglip(vision: JsonMapping, *, layer: int | None = None) -> VitSpec:
    """The encoder in a `vision_config`. `layer`: the hidden states that are used, 0 before the
    first layer, -1 after the last; None: those after the last norm. Raises UnsupportedModel."""
    num_layers = size(vision, "num_hidden_layers", 12, most=MAX_LAYERS)
    return _read(
        vision,
        name="SigLIP",
        num_stored_layers=num_layers,
        num_layers=num_layers if layer is None else layers_up_to(layer, num_layers),
        patch_size=size(vision, "patch_size", 16),
        norm_eps=number(vision, "layer_norm_eps", 1e-6, low=0.0),
        activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        has_last_norm=layer is None,
    )


def read_clip(vision: JsonMapping, *, layer: int) -> VitSpec:
    """Like `read_siglip`. The norm after the last layer is only for the class token, and unread."""
    num_layers = size(vision, "num_hidden_layers", 12, most=MAX_LAYERS)
    return _read(
        vision,
        name="CLIP",
        num_stored_layers=num_layers,
        num_layers=layers_up_to(layer, num_layers),
        patch_size=size(vision, "patch_size", 32),
        norm_eps=number(vision, "layer_norm_eps", 1e-5, low=0.0),
        activation=activation(vision, "hidden_act", "quick_gelu"),
        has_class_token=True,
        has_last_norm=False,
    )


def activation(config: JsonMapping, key: str, usual: str) -> str:
    """The activation that a key names, `usual` without the key. Raises UnsupportedModel if it is
    none of ACTIVATIONS."""
    require(config, key, *ACTIVATIONS)
    return get(config, key, str, usual)


def layers_up_to(layer: int, num_layers: int) -> int:
    """The number of layers that compute the hidden states `layer`: 0 is before the first layer, -1
    after the last. Raises BadConfig."""
    num = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 < num <= num_layers:
        raise BadConfig(f"vision_feature_layer is {layer}; the encoder has {num_layers} layers")
    return num


def _read(vision: JsonMapping, **values: Any) -> VitSpec:
    require(vision, "num_channels", 3)
    spec = VitSpec(
        hidden_size=size(vision, "hidden_size", 768),
        inner_size=size(vision, "intermediate_size", 3_072),
        num_heads=size(vision, "num_attention_heads", 12),
        image_size=size(vision, "image_size", 224),
        **values,
    )
    if spec.hidden_size % spec.num_heads or spec.head_dim % 2:
        raise UnsupportedModel(
            f"vision_config has {spec.hidden_size} numbers for {spec.num_heads} heads: each must "
            "have as many, an even number"
        )
    if spec.patch_size > spec.image_size:
        raise BadConfig(
            f"patch_size is {spec.patch_size}, more than the image_size of {spec.image_size}"
        )
    return spec

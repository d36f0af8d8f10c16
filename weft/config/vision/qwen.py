"""The towers of Qwen's models: encoders of pictures and videos of any size; squares of patches
become tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import MAX_LAYERS, get, number, require, rope_theta, section, size
from weft.config.media import MediaRules
from weft.config.model_errors import BadConfig
from weft.config.vision.vit import activation
from weft.json_types import JsonMapping

Config = JsonMapping  # a `config.json`

USUAL_PATCHES = 4_096  # patches of a large picture, for the reserved memory
MAX_HEAD_DIM = 256  # limit of the kernels


@dataclass(frozen=True, kw_only=True)
class MlpNames:
    """The names of the tensors of a feed-forward part: an up, with its gate if there is one, and a
    down; the activation is between them."""

    up: tuple[str, ...]
    down: str


@dataclass(frozen=True, kw_only=True)
class QwenTowerSpec:
    name: str  # for users
    hidden_size: int
    inner_size: int
    out_size: int  # hidden size of the decoder
    num_layers: int
    num_heads: int
    patch_size: int  # pixels per side
    time_size: int  # frames per patch
    merge_size: int  # patches per side of the square that becomes a token
    theta: float  # base of the rotation by row and column
    activation: str  # activation of the feed-forward part
    has_rms_norm: bool  # else norms by mean and deviation
    mlp: MlpNames  # names in a layer; there is a gate if `up` has two names
    merger: MlpNames
    merger_norm: str
    patch_bias: bool = False
    # Tokens per side of the windows in which patches see each other, in all layers except
    # `full_layers`; 0: all patches of a frame see each other, in all layers.
    window: int = 0
    full_layers: tuple[int, ...] = ()
    position_side: int = 0  # side of the square table of learnt positions; 0: there is none
    # Layers after which further vectors of a token are taken, for the first layers of the decoder.
    # A listed layer that the encoder does not have has weights, but gives no vectors.
    deepstack: tuple[int, ...] = ()
    kinds = ("image", "video")
    rules = MediaRules(has_three_positions=True)
    unread = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def square(self) -> int:
        """Patches per token."""
        return self.merge_size**2

    @property
    def num_parameters(self) -> int:
        matrices = len(self.mlp.up) + 1
        of_layer = 4 * self.hidden_size**2 + matrices * self.hidden_size * self.inner_size
        merged = self.square * self.hidden_size
        of_merger = merged * (merged + self.out_size)
        values = 3 * self.time_size * self.patch_size**2 + self.position_side**2
        num_mergers = 1 + len(self.deepstack)
        return self.num_layers * of_layer + num_mergers * of_merger + values * self.hidden_size

    @property
    def num_work_floats(self) -> int:
        # x, its norm, q, k, v and the output of attention; patches twice.
        values = 6 * self.time_size * self.patch_size**2
        return USUAL_PATCHES * (6 * self.hidden_size + self.inner_size + values)

    @property
    def shown_name(self) -> str:
        pixels = self.patch_size * self.merge_size
        return f"{self.name} of {self.num_layers} layers, a token for {pixels} x {pixels} pixels"


def qwen2_vl(config: Config, out_size: int) -> QwenTowerSpec | None:
    """The tower in a `config.json`; None if it does not fit a decoder of hidden size `out_size`, or
    no kernel computes it: then only text is served. Raises UnsupportedModel."""
    vision = section(config, "vision_config")
    hidden = size(vision, "embed_dim", 1_280)
    return _read(
        vision,
        size(vision, "hidden_size", 3_584),
        out_size,
        name="Qwen2-VL",
        hidden_size=hidden,
        inner_size=int(hidden * number(vision, "mlp_ratio", 4, above=0.0)),
        patch_size=size(vision, "patch_size", 14),
        activation=activation(vision, "hidden_act", "quick_gelu"),
        has_rms_norm=False,
        mlp=MlpNames(up=("fc1",), down="fc2"),
        merger=MlpNames(up=("mlp.0",), down="mlp.2"),
        merger_norm="ln_q",
    )


def qwen2_5_vl(config: Config, out_size: int) -> QwenTowerSpec | None:
    """Like `qwen2_vl`."""
    vision = section(config, "vision_config")
    patch_size = size(vision, "patch_size", 14)
    merge_size = size(vision, "spatial_merge_size", 2)
    pixels = size(vision, "window_size", 112)
    if pixels < patch_size * merge_size:
        raise BadConfig(
            f"window_size is {pixels}, less than the {patch_size * merge_size} pixels of a token"
        )
    return _read(
        vision,
        size(vision, "out_hidden_size", 3_584),
        out_size,
        name="Qwen2.5-VL",
        hidden_size=size(vision, "hidden_size", 3_584),
        inner_size=size(vision, "intermediate_size", 3_420),
        patch_size=patch_size,
        activation=_silu(vision),
        has_rms_norm=True,
        mlp=MlpNames(up=("gate_proj", "up_proj"), down="down_proj"),
        merger=MlpNames(up=("mlp.0",), down="mlp.2"),
        merger_norm="ln_q",
        window=pixels // merge_size // patch_size,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
    )


def qwen3_vl(config: Config, out_size: int) -> QwenTowerSpec | None:
    """Like `qwen2_vl`."""
    layers = _layers(section(config, "vision_config"), "deepstack_visual_indexes", (8, 16, 24))
    return _qwen3(config, out_size, "Qwen3-VL", layers)


def qwen3_5(config: Config, out_size: int) -> QwenTowerSpec | None:
    """Like `qwen2_vl`."""
    return _qwen3(config, out_size, "Qwen3.5", ())


def _qwen3(
    config: Config, out_size: int, name: str, deepstack: tuple[int, ...]
) -> QwenTowerSpec | None:
    vision = section(config, "vision_config")
    num_positions = size(vision, "num_position_embeddings", 2_304)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise BadConfig(f"num_position_embeddings is {num_positions}; it must be a square")
    return _read(
        vision,
        size(vision, "out_hidden_size", 3_584),
        out_size,
        depth=27,
        name=name,
        hidden_size=size(vision, "hidden_size", 1_152),
        inner_size=size(vision, "intermediate_size", 4_304),
        patch_size=size(vision, "patch_size", 16),
        activation=activation(vision, "hidden_act", "gelu_pytorch_tanh"),
        has_rms_norm=False,
        mlp=MlpNames(up=("linear_fc1",), down="linear_fc2"),
        merger=MlpNames(up=("linear_fc1",), down="linear_fc2"),
        merger_norm="norm",
        patch_bias=True,
        position_side=side,
        deepstack=deepstack,
    )


def _read(
    vision: JsonMapping, made_for: int, out_size: int, depth: int = 32, **values: Any
) -> QwenTowerSpec | None:
    """The tower; None if it does not fit. `made_for`: size of its output vectors. `depth`: default
    number of layers."""
    require(vision, "in_channels", 3)
    rope = section(vision, "rope_parameters")
    spec = QwenTowerSpec(
        out_size=out_size,
        num_layers=size(vision, "depth", depth, most=MAX_LAYERS),
        num_heads=size(vision, "num_heads", 16),
        time_size=size(vision, "temporal_patch_size", 2),
        merge_size=size(vision, "spatial_merge_size", 2),
        theta=rope_theta(rope),
        **values,
    )
    fits = made_for == out_size and spec.hidden_size % spec.num_heads == 0
    if not fits or spec.head_dim % 4 or spec.head_dim > MAX_HEAD_DIM:
        return None
    return spec


def _silu(vision: JsonMapping) -> str:
    require(vision, "hidden_act", "silu")
    return "silu"


def _layers(vision: JsonMapping, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    layers = get(vision, key, list, list(default))
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise BadConfig(f"{key} is {str(layers)[:64]}; it must be a list of layers")
    if len(set(layers)) < len(layers):
        raise BadConfig(f"{key} is {layers}; it names a layer twice")
    return tuple(layers)

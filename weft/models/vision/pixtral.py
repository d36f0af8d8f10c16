"""The tower of Pixtral, and of Mistral since Small 3.1: patches of a picture of any size, which
attend to all of its patches, and are rotated by row and column."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import Tensor

from weft.arrays import IntArray
from weft.config.vision.pixtral import PixtralSpec
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights
from weft.models.vision.layer import QKV, LayerNames, LayerShape, TowerLayer, TwoProducts
from weft.models.vision.tower import Pieces, PlaneRotation, TowerBackend, TowerInput
from weft.models.vision.vit import Patches, patches_of

NORM_EPS = 1e-5
MAX_SIDE = 4_096  # patches
TOWER = "vision_tower"
PROJECTOR = "multi_modal_projector"
LAYER = LayerNames(
    attention_norm="attention_norm",
    attention="attention",
    qkv=QKV,
    out="o_proj",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    up=("gate_proj", "up_proj"),
    down="down_proj",
)


class PixtralTower:
    def __init__(self, spec: PixtralSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self.patches = Patches(spec.patch_values, hidden, False, ops)
        self.first_norm = RmsNorm(hidden, NORM_EPS, ops)
        rotation = PlaneRotation(spec.head_dim, spec.theta, MAX_SIDE, alternates=True)
        self._attention = backend.make_attention(spec.num_heads, spec.head_dim, rotation)
        self.layers = [self._layer() for _ in range(spec.num_layers)]
        self.merge_norm: RmsNorm | None = None
        self.merging: Linear | None = None
        if spec.merge_size:
            merged = spec.merge_size**2 * hidden
            self.merge_norm = RmsNorm(hidden, spec.merge_norm_eps, ops)
            self.merging = Linear(merged, {"merging_layer": hidden}, False, ops)
        self.projector = TwoProducts(
            (hidden, spec.out_size, spec.out_size),
            ("linear_1",),
            "linear_2",
            spec.projector_activation,
            ops,
            has_bias=spec.projector_bias,
        )

    def _layer(self) -> TowerLayer:
        spec = self._spec
        shape = LayerShape(spec.hidden_size, spec.inner_size, spec.activation, has_bias=False)
        norms = (
            RmsNorm(spec.hidden_size, NORM_EPS, self._ops),
            RmsNorm(spec.hidden_size, NORM_EPS, self._ops),
        )
        return TowerLayer(shape, LAYER, norms, self._ops, self._attention)

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, H, W]: a picture; its grid of tokens is [1, rows, columns]."""
        spec = self._spec
        rows, columns = input.plane(spec.token_side)
        num_merged = max(spec.merge_size, 1)
        height, width = rows * num_merged, columns * num_merged
        if max(height, width) > MAX_SIDE:
            raise ValueError(
                f"a picture has {max(height, width)} patches of a side; at most are {MAX_SIDE}"
            )
        self._attention.prepare([height * width], plane(height, width))
        patches = patches_of(input.values, spec.patch_size)
        hidden = yield from self._backend.run_in_pieces(self._layers, patches)
        if spec.merge_size:
            hidden = squares_of(hidden, height, width, spec.merge_size)
        return self._backend.run(self._project, hidden)

    def _layers(self, patches: Tensor) -> Tensor:
        x = self.first_norm(self._ops.computed(self.patches(patches)))
        x = self._ops.computed(x)
        for layer in self.layers:
            x = layer(x)
        if self.merge_norm is not None:
            x = self.merge_norm(x)
        return self._ops.computed(x)

    def _project(self, x: Tensor) -> Tensor:
        if self.merging is not None:
            x = self._ops.computed(self.merging(x))
        return self._ops.computed(self.projector(x))

    def weights(self) -> Weights:
        size = self._spec.patch_size
        yield from self.patches.weights(f"{TOWER}.patch_conv", (3, size, size))
        yield from self.first_norm.weights(f"{TOWER}.ln_pre")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{TOWER}.transformer.layers.{index}")
        if self.merge_norm is not None:
            yield from self.merge_norm.weights(f"{PROJECTOR}.norm")
        if self.merging is not None:
            yield from self.merging.weights(f"{PROJECTOR}.patch_merger")
        yield from self.projector.weights(PROJECTOR)


@lru_cache(maxsize=16)
def plane(height: int, width: int) -> IntArray:
    """[3, P] row and column of each patch in reading order, and its row again."""
    row, column = np.divmod(np.arange(height * width, dtype=np.int32), np.int32(width))
    return np.stack((row, column, row))


def squares_of(x: Tensor, height: int, width: int, side: int) -> Tensor:
    """[height * width, n] -> [squares, n * side * side]: for each of the n features, its values in
    all patches of the square."""
    cut = x.view(height // side, side, width // side, side, -1)
    return cut.permute(0, 2, 4, 1, 3).reshape(height * width // side**2, -1)

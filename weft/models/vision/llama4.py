"""The tower of Llama 4: the patches of a tile and a class token, which attend to each other and are
rotated by row and column; then squares of patches."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.vision.llama4 import Llama4TowerSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.weight import Weights, vector
from weft.models.vision.layer import QKV, LayerNames, LayerShape, TowerLayer
from weft.models.vision.tower import Pieces, PlaneRotation, TowerBackend, TowerInput
from weft.models.vision.vit import patches_of
from weft.ops.plain import PlainMatrix

ACTIVATION = "gelu"
NORM_EPS = 1e-5
TOWER = "vision_model"
LAYER = LayerNames(
    attention_norm="input_layernorm",
    attention="self_attn",
    qkv=QKV,
    out="o_proj",
    mlp_norm="post_attention_layernorm",
    mlp="mlp",
    up=("fc1",),
    down="fc2",
)


class Llama4Tower:
    def __init__(self, spec: Llama4TowerSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self._places = places_of(spec.side)
        self.patches = Linear(spec.patch_values, {"linear": hidden}, False, ops)
        self.positions = Embedding(spec.num_rows, hidden, ops)
        self.class_token = ops.vector(hidden)
        self.first_norm = self._norm()
        rotation = PlaneRotation(spec.head_dim, spec.theta, spec.side + 1, side_by_side=True)
        self._attention = backend.make_attention(spec.num_heads, spec.head_dim, rotation)
        self.layers = [self._layer() for _ in range(spec.num_layers)]
        self.last_norm = self._norm()
        adapter = spec.adapter_size
        self.first = Linear(spec.square_values, {"fc1": adapter}, False, ops)
        self.second = Linear(adapter, {"fc2": adapter}, False, ops)
        self.projection = Linear(adapter, {"linear_1": spec.out_size}, False, ops)

    def _norm(self) -> CenteredNorm:
        return CenteredNorm(self._spec.hidden_size, NORM_EPS, self._ops, has_bias=True)

    def _layer(self) -> TowerLayer:
        spec = self._spec
        shape = LayerShape(spec.hidden_size, spec.inner_size, ACTIVATION, has_bias=True)
        return TowerLayer(shape, LAYER, (self._norm(), self._norm()), self._ops, self._attention)

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, side, side]: a tile."""
        spec = self._spec
        shape = (3, spec.image_size, spec.image_size)
        if tuple(input.values.shape) != shape:
            raise ValueError(
                f"a tile has the shape {list(input.values.shape)}; this encoder reads {list(shape)}"
            )
        patches = patches_of(input.values, spec.patch_size)
        # The class token, the last one, is a patch of zeros: patches have no bias.
        patches = torch.cat((patches, patches.new_zeros(1, patches.shape[1])))
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        positions = table.rows(torch.arange(spec.num_rows, device=self._backend.device))
        last = positions[-1:] + self.class_token
        self._attention.prepare([spec.num_rows], self._places)
        hidden = yield from self._backend.run_in_pieces(
            self._layers, torch.cat((positions[:-1], last)), patches
        )
        num = spec.shuffle
        side = spec.side // num
        squares = hidden[:-1].view(side, num, side, num, -1).transpose(1, 2)
        return self._backend.run(self._project, squares.reshape(side**2, -1))

    def _layers(self, x: Tensor, patches: Tensor) -> Tensor:
        x = self.first_norm(x + self.patches(patches))
        x = self._ops.computed(x)
        for layer in self.layers:
            x = layer(x)
        return self._ops.computed(self.last_norm(x))

    def _project(self, x: Tensor) -> Tensor:
        for linear in (self.first, self.second):
            x = self._ops.computed(self._ops.activated(x, linear.matrix, ACTIVATION))
        return self._ops.computed(self.projection(x))

    def weights(self) -> Weights:
        yield from self.patches.weights(f"{TOWER}.patch_embedding")
        for weight in self.positions.weights(TOWER):
            yield weight._replace(name=f"{TOWER}.positional_embedding_vlm")
        yield vector(f"{TOWER}.class_embedding", self.class_token)
        yield from self.first_norm.weights(f"{TOWER}.layernorm_pre")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{TOWER}.model.layers.{index}")
        yield from self.last_norm.weights(f"{TOWER}.layernorm_post")
        yield from self.first.weights(f"{TOWER}.vision_adapter.mlp")
        yield from self.second.weights(f"{TOWER}.vision_adapter.mlp")
        yield from self.projection.weights("multi_modal_projector")


def places_of(side: int) -> IntArray:
    """[3, side * side + 1] column and row of each patch from 1 on, and its column again; 0 for the
    class token, which is not rotated."""
    row, column = np.divmod(np.arange(side * side, dtype=np.int32), np.int32(side))
    places = np.stack((column, row, column)) + np.int32(1)
    return np.pad(places, ((0, 0), (0, 1)))

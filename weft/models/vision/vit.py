"""A transformer over the patches of a picture: SigLIP and CLIP."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.config.vision.vit import VitSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear, bias_weight
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.weight import Weight, Weights, vector
from weft.models.vision.layer import VIT, LayerShape, TowerLayer
from weft.models.vision.tower import Pieces, TowerBackend
from weft.ops.encoder import EncoderOps
from weft.ops.plain import PlainMatrix
from weft.ops.protocol import Matrix


class Vit:
    def __init__(self, spec: VitSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self.patches = Patches(spec.patch_values, spec.hidden_size, not spec.has_class_token, ops)
        self.positions = Embedding(spec.num_positions, spec.hidden_size, ops)
        self.class_token: Tensor | None = None
        self.first_norm: CenteredNorm | None = None
        if spec.has_class_token:
            self.class_token = ops.vector(spec.hidden_size)
            self.first_norm = _norm(spec, ops)
        self._attention = backend.make_attention(spec.num_heads, spec.head_dim)
        self.layers = [self._layer() for _ in range(spec.num_layers)]
        self.last_norm = _norm(spec, ops) if spec.has_last_norm else None

    def __call__(self, pixels: Tensor, places: Tensor) -> Pieces:
        """pixels [3, side, side] and the position index of each patch [P] -> [P, hidden]. The class
        token attends to all patches, and is not returned."""
        spec = self._spec
        if tuple(pixels.shape) != (3, spec.image_size, spec.image_size):
            raise ValueError(
                f"a picture has the shape {list(pixels.shape)}; this encoder reads "
                f"{[3, spec.image_size, spec.image_size]}"
            )
        patches = patches_of(pixels, spec.patch_size)
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        if self.class_token is None:
            positions = table.rows(places)
        else:
            # The class token is a patch of zeros (patches have no bias here) whose position is the
            # token.
            patches = torch.cat((patches.new_zeros(1, patches.shape[1]), patches))
            first = self.class_token + table.rows(places.new_zeros(1))
            positions = torch.cat((first, table.rows(places + 1)))
        self._attention.prepare([len(patches)])
        hidden = yield from self._backend.run_in_pieces(self._layers, positions, patches)
        return hidden if self.class_token is None else hidden[1:]

    def _layer(self) -> TowerLayer:
        spec = self._spec
        shape = LayerShape(spec.hidden_size, spec.inner_size, spec.activation, has_bias=True)
        norms = (_norm(spec, self._ops), _norm(spec, self._ops))
        return TowerLayer(shape, VIT, norms, self._ops, self._attention)

    def _layers(self, x: Tensor, patches: Tensor) -> Tensor:
        x = x + self.patches(patches)
        if self.first_norm is not None:
            x = self.first_norm(x)
        for layer in self.layers:
            x = layer(x)
        if self.last_norm is not None:
            x = self.last_norm(x)
        return self._ops.computed(x)

    def weights(self, prefix: str) -> Weights:
        size = self._spec.patch_size
        yield from self.patches.weights(f"{prefix}.embeddings.patch_embedding", (3, size, size))
        yield from self.positions.weights(f"{prefix}.embeddings.position_embedding")
        if self.class_token is not None:
            yield vector(f"{prefix}.embeddings.class_embedding", self.class_token)
        if self.first_norm is not None:
            yield from self.first_norm.weights(f"{prefix}.pre_layrnorm")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{prefix}.encoder.layers.{index}")
        if self.last_norm is not None:
            yield from self.last_norm.weights(f"{prefix}.post_layernorm")


class Patches:
    """W x + b of patches: a convolution whose windows do not overlap."""

    def __init__(self, in_size: int, out_size: int, bias: bool, ops: EncoderOps) -> None:
        self._inner = Linear(in_size, {"": out_size}, bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[P, values of a patch] -> [P, out_size]"""
        return self._inner(x)

    def weights(self, prefix: str, shape: tuple[int, ...]) -> Weights:
        """`shape` of a patch in checkpoints: colours, time if there is one, height and width."""
        whole = (self._inner.matrix.sizes[0], *shape)
        yield patch_weight(f"{prefix}.weight", whole, self._inner.matrix)
        if self._inner.bias:
            yield bias_weight(f"{prefix}.bias", self._inner.matrix, 0)


def patch_weight(name: str, shape: tuple[int, ...], matrix: Matrix) -> Weight:
    """A matrix [shape[0], all others] that checkpoints have as a convolution."""

    def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        assert scales is None
        matrix.put(0, content.flatten(1), start)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get(0, start, stop).view(-1, *shape[1:])

    return Weight(name, shape, put, get)


def transposed_weight(name: str, shape: tuple[int, int], matrix: Matrix) -> Weight:
    """A matrix [shape[1], shape[0]] that checkpoints have with its inputs first."""
    pieces: list[Tensor] = []  # of incomplete content

    def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        assert scales is None
        if start == 0:
            pieces.clear()
        pieces.append(content.clone())
        if sum(map(len, pieces)) == shape[0]:
            matrix.put(0, torch.cat(pieces).t().contiguous())
            pieces.clear()

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get(0).t()[start:stop]

    return Weight(name, shape, put, get)


def patches_of(pixels: Tensor, size: int) -> Tensor:
    """[3, H, W] -> [H / size * W / size, 3 * size * size], in reading order, colour by colour
    within a patch; incomplete patches at the ends are cut off."""
    colours, height, width = pixels.shape
    rows = height // size
    columns = width // size
    cut = pixels[:, : rows * size, : columns * size]
    blocks = cut.reshape(colours, rows, size, columns, size)
    return blocks.permute(1, 3, 0, 2, 4).reshape(rows * columns, colours * size * size)


def _norm(spec: VitSpec, ops: EncoderOps) -> CenteredNorm:
    return CenteredNorm(spec.hidden_size, spec.norm_eps, ops, has_bias=True)

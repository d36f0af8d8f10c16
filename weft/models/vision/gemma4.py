"""The tower of Gemma 4: patches of a picture of any size, which attend to all of its patches, and
are rotated by column and row; the mean of each square of them becomes a token."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.config.decoder import NormKind
from weft.config.vision.gemma4 import GELU, TOWER, Gemma4TowerSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weight, Weights, vector
from weft.models.vision.layer import QKV, GatedProducts, LayerShape, plain_norm
from weft.models.vision.limited import LimitedLinear
from weft.models.vision.tower import (
    Pieces,
    PlaneRotation,
    TowerAttention,
    TowerBackend,
    TowerHeads,
    TowerInput,
)
from weft.ops.encoder import EncoderOps
from weft.ops.plain import PlainMatrix
from weft.ops.protocol import Matrix
from weft.ops.quantize import widened

MAX_SIDE = 4_096  # patches
TABLE = f"{TOWER}.patch_embedder.position_embedding_table"


class Gemma4Tower:
    def __init__(
        self,
        spec: Gemma4TowerSpec,
        backend: TowerBackend,
    ) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self.patches = Linear(
            spec.patch_values,
            {"input_proj": hidden},
            False,
            ops,
        )
        self.positions = Embedding(
            2 * spec.num_places,
            hidden,
            ops,
        )
        self._max_side = min(spec.num_places, MAX_SIDE)
        rotation = PlaneRotation(
            spec.head_dim,
            spec.theta,
            self._max_side,
        )
        attention = backend.make_attention(
            spec.num_heads,
            spec.head_dim,
            rotation,
        )
        self._attention = attention
        self.layers = [Gemma4Layer(spec, ops, attention) for _ in range(spec.num_layers)]
        # [bias | scale] of standardized tokens
        self.standard = ops.vector(2 * hidden, exact=True) if spec.is_standardized else None
        self.norm = plain_norm(
            hidden,
            spec.norm_eps,
            ops,
        )
        self.projection = Linear(
            hidden,
            {"embedding_projection": spec.out_size},
            False,
            ops,
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, H, W], from 0 to 1: a picture; its grid of tokens is
        [1, rows, columns]."""
        spec = self._spec
        rows, columns = input.plane(spec.token_side)
        height, width = rows * spec.pool, columns * spec.pool
        if max(height, width) > self._max_side:
            raise ValueError(
                f"a picture has {max(height, width)} patches of a side; at most are "
                f"{self._max_side}"
            )
        places = plane(height, width)
        self._attention.prepare([height * width], places)
        patches = patches_by_pixel(2 * input.values - 1, spec.patch_size)
        learnt = self._learnt(places)
        hidden = yield from self._backend.run_in_pieces(
            self._layers,
            learnt,
            patches,
        )
        squares = hidden.float().view(rows, spec.pool, columns, spec.pool, -1).mean((1, 3))
        tokens = squares.flatten(0, 1) * math.sqrt(spec.hidden_size)
        if self.standard is not None:
            bias, scale = self.standard.chunk(2)
            tokens = (tokens - bias) * scale
        return self._backend.run(self._project, tokens)

    def _learnt(self, places: IntArray) -> Tensor:
        """[P, hidden] the learnt positions of the patches."""
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        columns, rows, _ = torch.from_numpy(places).to(self._backend.device)
        return table.rows(columns).float() + table.rows(rows + self._spec.num_places).float()

    def _layers(
        self,
        x: Tensor,
        patches: Tensor,
    ) -> Tensor:
        x = x + self.patches(patches)
        for layer in self.layers:
            x = layer(x)
        return self._ops.computed(x)

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projection(self._ops.norm(x, self.norm)))

    def weights(self) -> Weights:
        spec = self._spec
        yield from self.patches.weights(f"{TOWER}.patch_embedder")
        shape = (2, spec.num_places, spec.hidden_size)
        yield table_weight(
            TABLE,
            shape,
            self.positions.matrix,
        )
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{TOWER}.encoder.layers.{index}")
        if self.standard is not None:
            for name, values in zip(("std_bias", "std_scale"), self.standard.chunk(2), strict=True):
                yield vector(f"{TOWER}.{name}", values)
        yield from self.projection.weights("embed_vision")


# In their order: around attention, and around the feed-forward part.
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma4Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self,
        spec: Gemma4TowerSpec,
        ops: EncoderOps,
        attention: TowerAttention,
    ) -> None:
        self._attention = attention
        self._num_heads = spec.num_heads
        self.norms = {name: _norm(spec, spec.hidden_size, ops) for name in NORMS}
        self.q_norm = _norm(
            spec,
            spec.head_dim,
            ops,
        )
        self.k_norm = _norm(
            spec,
            spec.head_dim,
            ops,
        )
        self._heads = TowerHeads(
            self.q_norm.norm,
            self.k_norm.norm,
            plain_norm(spec.head_dim, spec.norm_eps, ops),
            scale=1.0,
        )
        make = LimitedProducts if spec.is_limited else PlainProducts
        self.products: PlainProducts | LimitedProducts = make(spec, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        before, after, before_mlp, after_mlp = (self.norms[name] for name in NORMS)
        products = self.products
        attended = self._attention.forward(products.qkv(before(x)), self._heads)
        x = x + after(products.out(attended))
        return x + after_mlp(products.mlp(before_mlp(x)))

    def weights(self, prefix: str) -> Weights:
        for name, norm in self.norms.items():
            yield from norm.weights(f"{prefix}.{name}")
        for weight in self.q_norm.weights(f"{prefix}.self_attn.q_norm"):
            yield permuted(weight, 1)
        for weight in self.k_norm.weights(f"{prefix}.self_attn.k_norm"):
            yield permuted(weight, 1)
        for weight in self.products.weights(prefix):
            is_permuted = weight.name.endswith(("q_proj.linear.weight", "k_proj.linear.weight"))
            yield permuted(weight, self._num_heads) if is_permuted else weight


class PlainProducts:
    """The matrix products of a layer."""

    def __init__(
        self,
        spec: Gemma4TowerSpec,
        ops: EncoderOps,
    ) -> None:
        hidden = spec.hidden_size
        size = spec.attention_size
        self._ops = ops
        self._qkv = Linear(hidden, {f"{name}.linear": size for name in QKV}, False, ops)
        self._out = Linear(
            size,
            {"o_proj.linear": hidden},
            False,
            ops,
        )
        shape = LayerShape(
            hidden,
            spec.inner_size,
            GELU,
            has_bias=False,
        )
        names = ("gate_proj.linear", "up_proj.linear")
        self._mlp = GatedProducts(
            shape,
            names,
            "down_proj.linear",
            ops,
        )

    def qkv(self, x: Tensor) -> Tensor:
        return self._ops.computed(self._qkv(x))

    def out(self, x: Tensor) -> Tensor:
        return self._out(x)

    def mlp(self, x: Tensor) -> Tensor:
        return self._mlp(x)

    def weights(self, prefix: str) -> Weights:
        yield from self._qkv.weights(f"{prefix}.self_attn")
        yield from self._out.weights(f"{prefix}.self_attn")
        yield from self._mlp.weights(f"{prefix}.mlp")


class LimitedProducts:
    """The same of a layer whose products have limits."""

    def __init__(
        self,
        spec: Gemma4TowerSpec,
        ops: EncoderOps,
    ) -> None:
        hidden = spec.hidden_size
        size = spec.attention_size
        self._ops = ops
        self._size = size
        self._qkv = [LimitedLinear(hidden, name, size, ops) for name in QKV]
        self._out = LimitedLinear(
            size,
            "o_proj",
            hidden,
            ops,
        )
        self._gate = LimitedLinear(
            hidden,
            "gate_proj",
            spec.inner_size,
            ops,
        )
        self._up = LimitedLinear(
            hidden,
            "up_proj",
            spec.inner_size,
            ops,
        )
        self._down = LimitedLinear(
            spec.inner_size,
            "down_proj",
            hidden,
            ops,
        )

    def qkv(self, x: Tensor) -> Tensor:
        x = self._ops.computed(x)
        found = self._ops.space(x, 3 * self._size)
        for part, out in zip(self._qkv, found.chunk(3, dim=1), strict=True):
            part.into(x, out)
        return found

    def out(self, x: Tensor) -> Tensor:
        return self._out(x)

    def mlp(self, x: Tensor) -> Tensor:
        x = self._ops.computed(x)
        return self._down(self._ops.multiply(self._gate(x, GELU), self._up(x)))

    def weights(self, prefix: str) -> Weights:
        for part in (*self._qkv, self._out):
            yield from part.weights(f"{prefix}.self_attn")
        for part in (self._gate, self._up, self._down):
            yield from part.weights(f"{prefix}.mlp")


def table_weight(
    name: str,
    shape: tuple[int, int, int],
    matrix: Matrix,
) -> Weight:
    """A matrix of rows that checkpoints have as several tables: [tables, rows, size]."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert scales is None
        matrix.put(
            0,
            content.flatten(0, 1),
            start * shape[1],
        )

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return matrix.get(0).view(shape)[start:stop]

    return Weight(
        name,
        shape,
        put,
        get,
    )


def permuted(weight: Weight, num_heads: int) -> Weight:
    """A weight of heads that checkpoints have in another order. There, columns rotate
    pairs of the first half of a head, and rows those of its second half; here, pairs (i, i + half)
    of the whole head with i in its first quarter, or in its second: the quarters in the middle
    change places."""
    pieces: list[Tensor] = []  # of incomplete content

    def permute(content: Tensor) -> Tensor:
        quarters = content.view(
            num_heads,
            4,
            len(content) // num_heads // 4,
            *content.shape[1:],
        )
        return quarters[:, [0, 2, 1, 3]].reshape(content.shape)

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        if start == 0:
            pieces.clear()
        pieces.append(widened(content, scales).clone())
        if sum(map(len, pieces)) == weight.shape[0]:
            weight.put(permute(torch.cat(pieces)))
            pieces.clear()

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return permute(weight.get())[start:stop]

    return Weight(
        weight.name,
        weight.shape,
        put,
        get,
    )


def _norm(
    spec: Gemma4TowerSpec,
    size: int,
    ops: EncoderOps,
) -> RmsNorm:
    return RmsNorm(
        size,
        spec.norm_eps,
        ops,
        kind=NormKind.RMS_EXACT,
    )


@lru_cache(maxsize=16)
def plane(height: int, width: int) -> IntArray:
    """[3, P] column and row of each patch in reading order, and its column again."""
    row, column = np.divmod(np.arange(height * width, dtype=np.int32), np.int32(width))
    return np.stack((column, row, column))


def patches_by_pixel(pixels: Tensor, size: int) -> Tensor:
    """[3, H, W] -> [H / size * W / size, size * size * 3], in reading order, pixel by pixel within
    a patch."""
    colours, height, width = pixels.shape
    cut = pixels.view(
        colours,
        height // size,
        size,
        width // size,
        size,
    )
    return cut.permute(1, 3, 2, 4, 0).reshape(-1, size * size * colours)

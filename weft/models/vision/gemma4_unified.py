"""The pictures and sounds of the unified Gemma 4, which has products instead of encoders."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from weft.config.vision.gemma4_sound import MAX_TOKENS
from weft.config.vision.gemma4_unified import PatchSpec, WaveSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.weight import Weights
from weft.models.vision.gemma4 import patches_by_pixel, table_weight
from weft.models.vision.layer import plain_norm
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.models.vision.vit import patches_of
from weft.ops.plain import PlainMatrix

EMBEDDER = "vision_embedder"
CENTERED_EPS = 1e-5


class PatchTower:
    """matrix(norm(norm(norm(W norm(patch) + b) + position)))"""

    def __init__(self, spec: PatchSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self.patch_norm = CenteredNorm(spec.patch_values, CENTERED_EPS, ops, has_bias=True)
        self.patches = Linear(spec.patch_values, {"patch_dense": hidden}, True, ops)
        self.inner_norm = CenteredNorm(hidden, CENTERED_EPS, ops, has_bias=True)
        self.positions = Embedding(2 * spec.num_places, hidden, ops)
        self.position_norm = CenteredNorm(hidden, CENTERED_EPS, ops, has_bias=True)
        self.last_norm = plain_norm(hidden, spec.norm_eps, ops)
        self.projection = Linear(hidden, {"embedding_projection": spec.out_size}, False, ops)

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, H, W], from 0 to 1: a picture; its grid of tokens is
        [1, rows, columns]."""
        spec = self._spec
        assert input.grid is not None, "these pictures have a grid"
        _, rows, columns = input.grid
        height = rows * spec.token_side
        width = columns * spec.token_side
        shape = (3, height, width)
        is_long = max(rows, columns) > spec.num_places
        if tuple(input.values.shape) != shape or is_long:
            raise ValueError(
                f"a picture of {rows} x {columns} tokens has the shape "
                f"{list(input.values.shape)}; this encoder reads {list(shape)}, and up to "
                f"{spec.num_places} tokens of a side"
            )
        cut = patches_by_pixel
        if spec.is_by_colour:
            cut = patches_of
        patches = cut(input.values, spec.token_side)
        entered = yield from self._backend.run_in_pieces(self._enter, patches)
        learnt = self._learnt(rows, columns)
        placed = entered.float() + learnt
        return self._backend.run(self._leave, placed)

    def _learnt(self, num_rows: int, num_columns: int) -> Tensor:
        """[T, hidden] the learnt positions of the tokens, in reading order."""
        num = num_rows * num_columns
        index = torch.arange(num, device=self._backend.device)
        of_columns = index % num_columns
        of_rows = index // num_columns
        if self._spec.is_by_colour:
            of_rows = of_rows + self._spec.num_places
        else:
            of_columns = 2 * of_columns
            of_rows = 2 * of_rows + 1
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        by_column = table.rows(of_columns)
        by_row = table.rows(of_rows)
        return by_column.float() + by_row.float()

    def _enter(self, patches: Tensor) -> Tensor:
        ops = self._ops
        normed = self.patch_norm(patches)
        inner = ops.computed(self.patches(normed))
        return ops.computed(self.inner_norm(inner))

    def _leave(self, x: Tensor) -> Tensor:
        ops = self._ops
        placed = ops.computed(self.position_norm(x))
        normed = ops.norm(placed, self.last_norm)
        return ops.computed(self.projection(normed))

    def weights(self) -> Weights:
        spec = self._spec
        yield from self.patch_norm.weights(f"{EMBEDDER}.patch_ln1")
        yield from self.patches.weights(EMBEDDER)
        yield from self.inner_norm.weights(f"{EMBEDDER}.patch_ln2")
        shape = (spec.num_places, 2, spec.hidden_size)
        if spec.is_by_colour:
            shape = (2, spec.num_places, spec.hidden_size)
        yield table_weight(f"{EMBEDDER}.pos_embedding", shape, self.positions.matrix)
        yield from self.position_norm.weights(f"{EMBEDDER}.pos_norm")
        yield from self.projection.weights("embed_vision")


class WaveTower:
    """matrix(norm(samples)) of each piece of a waveform."""

    def __init__(self, spec: WaveSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self.norm = plain_norm(spec.num_samples, spec.norm_eps, ops)
        self.projection = Linear(
            spec.num_samples, {"embedding_projection": spec.out_size}, False, ops
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [tokens, samples]: a sound."""
        num_tokens, num_samples = input.values.shape
        is_fitting = num_samples == self._spec.num_samples and 0 < num_tokens <= MAX_TOKENS
        if not is_fitting or num_tokens != input.length:
            raise ValueError(
                f"a sound of {input.length} tokens has the shape {list(input.values.shape)}; this "
                f"encoder reads {self._spec.num_samples} samples for each of up to {MAX_TOKENS} "
                "tokens"
            )
        vectors = yield from self._backend.run_in_pieces(self._project, input.values)
        return vectors

    def _project(self, samples: Tensor) -> Tensor:
        normed = self._ops.norm(samples, self.norm)
        return self._ops.computed(self.projection(normed))

    def weights(self) -> Weights:
        yield from self.projection.weights("embed_audio")

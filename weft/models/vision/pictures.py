"""The towers of Gemma 3, of Idefics 3 and SmolVLM, and of LLaVA: an encoder of patches, and the
projection of its output to vectors for the decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.config.decoder import NormKind
from weft.config.vision.pictures import PerceptronSpec, PictureSpec, PooledSpec, ShuffledSpec
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights
from weft.models.vision.layer import TwoProducts
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.models.vision.vit import Vit, transposed_weight


class PooledTower:
    """matrix(norm(mean over each square of patches))"""

    def __init__(self, spec: PooledSpec, backend: TowerBackend) -> None:
        encoder = spec.encoder
        self._spec = spec
        self._backend = backend
        self._ops = backend.ops
        self._places = in_order(spec, backend)
        self.encoder = Vit(encoder, backend)
        kind = NormKind.RMS_EXACT if spec.norm_is_whole else NormKind.RMS_PLUS_ONE
        self.norm = RmsNorm(encoder.hidden_size, encoder.norm_eps, backend.ops, kind=kind)
        self.projection = Linear(encoder.hidden_size, {"": spec.out_size}, False, backend.ops)

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, side, side]: a picture."""
        hidden = yield from self.encoder(input.values, self._places)
        pool = self._spec.pool
        side = self._spec.encoder.side // pool
        squares = hidden.view(side, pool, side, pool, -1)
        return self._backend.run(self._project, squares.mean((1, 3)).flatten(0, 1))

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projection(self.norm(x)))

    def weights(self) -> Weights:
        yield from self.encoder.weights(self._spec.encoder_name)
        yield from self.norm.weights("multi_modal_projector.mm_soft_emb_norm")
        yield transposed_weight(
            "multi_modal_projector.mm_input_projection_weight",
            (self._spec.encoder.hidden_size, self._spec.out_size),
            self.projection.matrix,
        )


class ShuffledTower:
    """matrix(the patches of a square, concatenated)"""

    def __init__(self, spec: ShuffledSpec, backend: TowerBackend) -> None:
        self._spec = spec
        self._backend = backend
        self._ops = backend.ops
        self._places = by_fractions(spec.encoder.side).to(backend.device)
        self.encoder = Vit(spec.encoder, backend)
        self.projection = Linear(
            spec.shuffle**2 * spec.encoder.hidden_size, {"proj": spec.out_size}, False, backend.ops
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, side, side]: a tile."""
        hidden = yield from self.encoder(input.values, self._places)
        num = self._spec.shuffle
        side = self._spec.encoder.side // num
        squares = hidden.view(side, num, side, num, -1).transpose(1, 2)
        return self._backend.run(self._project, squares.reshape(side**2, -1))

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projection(x))

    def weights(self) -> Weights:
        yield from self.encoder.weights(self._spec.encoder_name)
        yield from self.projection.weights("connector.modality_projection")


class PerceptronTower:
    """matrix(activation(matrix(x))) of each patch"""

    def __init__(self, spec: PerceptronSpec, backend: TowerBackend) -> None:
        self._spec = spec
        self._backend = backend
        self._ops = backend.ops
        self._places = in_order(spec, backend)
        self.encoder = Vit(spec.encoder, backend)
        self.projector = TwoProducts(
            (spec.encoder.hidden_size, spec.out_size, spec.out_size),
            ("linear_1",),
            "linear_2",
            spec.activation,
            backend.ops,
            has_bias=spec.has_bias,
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, side, side]: a picture."""
        hidden = yield from self.encoder(input.values, self._places)
        return self._backend.run(self._project, hidden)

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projector(x))

    def weights(self) -> Weights:
        yield from self.encoder.weights(self._spec.encoder_name)
        yield from self.projector.weights("multi_modal_projector")


def in_order(spec: PictureSpec, backend: TowerBackend) -> Tensor:
    """[P] the position index of each patch, in order."""
    return torch.arange(spec.encoder.num_patches, device=backend.device)


def by_fractions(side: int) -> Tensor:
    """[side * side] the position index of each patch: the interval of the table of positions in
    which the patch begins, with height and width as fractions of the whole.

    In float32, as in training: if a fraction is not exact, a patch may get the position of its
    neighbour.
    """
    limits = torch.arange(1 / side, 1.0, 1 / side)
    starts = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    places = torch.bucketize(starts.clamp(max=1.0 - 1e-6), limits, right=True)
    return (places[:, None] * side + places).flatten()

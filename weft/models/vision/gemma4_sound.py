"""Gemma 4's encoder of sounds: two convolutions, which torch computes, before a conformer."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from weft.config.vision.gemma4_sound import FIRST, MAX_TOKENS, TOWER, Gemma4SoundSpec
from weft.models.layers.linear import Linear
from weft.models.layers.weight import Weights, vector
from weft.models.vision.conformer import ConformerLayer
from weft.models.vision.layer import plain_norm
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.ops.encoder import EncoderOps


class Gemma4SoundTower:
    def __init__(
        self,
        spec: Gemma4SoundSpec,
        backend: TowerBackend,
    ) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        first, second = spec.channels
        self.convolutions = [
            Halving(1, first, spec, ops),
            Halving(first, second, spec, ops),
        ]
        self.entrance = Linear(
            spec.folded_size, {"input_proj_linear": spec.hidden_size}, False, ops
        )
        self.layers = [ConformerLayer(spec, backend) for _ in range(spec.num_layers)]
        self.last = Linear(
            spec.hidden_size,
            {"output_proj": spec.last_size},
            True,
            ops,
        )
        self.norm = plain_norm(
            spec.last_size,
            spec.norm_eps,
            ops,
        )
        self.projection = Linear(
            spec.last_size, {"embedding_projection": spec.out_size}, False, ops
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [frames, bands]: a sound; four frames make a vector, the last ones of
        fewer."""
        num_frames, num_bands = input.values.shape
        length = -(-num_frames // 4)
        if num_bands != self._spec.num_bands or length != input.length or length > MAX_TOKENS:
            raise ValueError(
                f"a sound of {input.length} tokens has the shape {list(input.values.shape)}; this "
                f"encoder reads {self._spec.num_bands} bands, and four frames for each of up to "
                f"{MAX_TOKENS} tokens"
            )
        planes = input.values.float()[None]
        for halving in self.convolutions:
            planes = halving(planes)
            yield
        by_frame = planes.permute(1, 2, 0)
        folded = by_frame.flatten(1)
        return (yield from self._backend.run_in_pieces(self._layers, folded))

    def _layers(self, folded: Tensor) -> Tensor:
        ops = self._ops
        x = ops.computed(self.entrance(folded))
        for layer in self.layers:
            x = layer(x)
        last = ops.computed(self.last(x))
        normed = ops.norm(last, self.norm)
        return ops.computed(self.projection(normed))

    def weights(self) -> Weights:
        for index, halving in enumerate(self.convolutions):
            yield from halving.weights(f"{FIRST}.layer{index}")
        yield from self.entrance.weights(FIRST)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"{TOWER}.layers.{index}")
        yield from self.last.weights(TOWER)
        yield from self.projection.weights("embed_audio")


class Halving:
    """A convolution of 3 x 3 that halves the number of frames and of bands, then a norm."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        spec: Gemma4SoundSpec,
        ops: EncoderOps,
    ) -> None:
        self._eps = spec.norm_eps
        self._shape = (out_size, in_size, 3, 3)
        self.kernel = ops.vector(math.prod(self._shape), exact=True)
        self.norm = ops.vector(out_size, exact=True)

    def __call__(self, planes: Tensor) -> Tensor:
        """[channels, frames, bands] -> [channels, frames / 2, bands / 2]"""
        [found] = F.conv2d(
            planes[None],
            self.kernel.view(self._shape),
            stride=2,
            padding=1,
        )
        normed = F.layer_norm(
            found.permute(1, 2, 0),
            self.norm.shape,
            self.norm,
            eps=self._eps,
        )
        return normed.relu().permute(2, 0, 1)

    def weights(self, prefix: str) -> Weights:
        yield vector(f"{prefix}.conv.weight", self.kernel, shape=self._shape)
        yield vector(f"{prefix}.norm.weight", self.norm)

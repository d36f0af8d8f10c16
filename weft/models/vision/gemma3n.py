"""The encoders of Gemma 3n: of pictures, and of sounds."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.decoder import NormKind
from weft.config.vision.gemma3n import (
    PICTURES,
    SOUNDS,
    Gemma3nPictureSpec,
    Gemma3nSoundSpec,
    SpecialVocab,
)
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights, vector
from weft.models.vision.conformer import ConformerLayer
from weft.models.vision.layer import plain_norm
from weft.models.vision.mobilenet import MobileNet
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.ops.encoder import EncoderOps
from weft.ops.plain import PlainMatrix

FIRST = f"{SOUNDS}.subsample_conv_projection"
# The names of a layer of sounds: Gemma 4's → Gemma 3n's, one after the other.
LAYER_NAMES = (
    (".linear.weight", ".weight"),
    ("feed_forward1.", "ffw_layer_start."),
    ("feed_forward2.", "ffw_layer_end."),
    ("norm_pre_attn.", "attention.pre_attn_norm."),
    ("norm_post_attn.", "attention.post_norm."),
    ("self_attn.post.", "attention.post."),
    ("self_attn.relative_k_proj.", "attention.attn.relative_position_embedding.pos_proj."),
    ("self_attn.", "attention.attn."),
    ("norm_out.", "norm."),
)


class Gemma3nPictureTower:
    def __init__(self, spec: Gemma3nPictureSpec, backend: TowerBackend) -> None:
        self._spec = spec
        self.net = MobileNet(spec.net, backend, PICTURES)
        self.embedder = Embedder(
            "embed_vision",
            (spec.net.out_size, spec.out_size),
            spec.norm_eps,
            spec.vocab,
            backend,
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [3, side, side]: a picture."""
        spec = self._spec
        shape = tuple(input.values.shape)
        step = spec.net.side_step
        side = shape[-1]
        is_square = shape == (3, side, side)
        is_fitting = side > 0 and side % step == 0
        if not is_square or not is_fitting or input.length != spec.num_vectors:
            raise ValueError(
                f"a picture of {input.length} tokens has the shape {list(shape)}; this encoder "
                f"reads squares of a multiple of {step} pixels, as {spec.num_vectors} tokens"
            )
        found = yield from self.net.encode(input.values)
        scaled = found * math.sqrt(spec.net.out_size)
        vectors = self.embedder(scaled)
        if spec.vocab.end is None:
            return vectors
        end = self.embedder.of_tokens([spec.vocab.end])
        return torch.cat((vectors, end))

    def weights(self) -> Weights:
        yield from self.net.weights()
        yield from self.embedder.weights()


class Gemma3nSoundTower:
    def __init__(self, spec: Gemma3nSoundSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        first, second = spec.channels
        self.convolutions = [
            CausalHalving(1, first, spec.conv_eps, ops),
            CausalHalving(first, second, spec.conv_eps, ops),
        ]
        self.entrance = Linear(
            spec.folded_size, {"input_proj_linear": spec.hidden_size}, False, ops
        )
        self.layers = [ConformerLayer(spec, backend) for _ in range(spec.num_layers)]
        self.embedder = Embedder(
            "embed_audio",
            (spec.hidden_size, spec.out_size),
            spec.norm_eps,
            spec.vocab,
            backend,
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [frames, bands]: a sound. Its vectors are followed by those that fill up
        the number of tokens."""
        spec = self._spec
        num_frames, num_bands = input.values.shape
        if (
            not 0 < num_frames <= spec.max_frames
            or num_bands != spec.num_bands
            or input.length != spec.num_vectors
        ):
            raise ValueError(
                f"a sound of {input.length} tokens has the shape {list(input.values.shape)}; this "
                f"encoder reads up to {spec.max_frames:,} frames of {spec.num_bands} bands, as "
                f"{spec.num_vectors} tokens"
            )
        planes = input.values.float()[None]
        for halving in self.convolutions:
            planes = halving(planes)
            yield
        by_frame = planes.permute(1, 2, 0)
        folded = by_frame.flatten(1)
        hidden = yield from self._backend.run_in_pieces(self._layers, folded)
        taken = hidden[:: spec.step]
        heard = self.embedder(taken)
        num_others = spec.num_tokens - len(heard)
        assert spec.vocab.filling is not None, "a sound has a filling"
        others = [spec.vocab.filling] * num_others
        if spec.vocab.end is not None:
            others.append(spec.vocab.end)
        if not others:
            return heard
        filling = self.embedder.of_tokens(others)
        return torch.cat((heard, filling))

    def _layers(self, folded: Tensor) -> Tensor:
        x = self._ops.computed(self.entrance(folded))
        for layer in self.layers:
            x = layer(x)
        return x

    def weights(self) -> Weights:
        for index, halving in enumerate(self.convolutions):
            yield from halving.weights(f"{FIRST}.conv_{index}")
        yield from self.entrance.weights(FIRST)
        for index, layer in enumerate(self.layers):
            for weight in layer.weights(f"{SOUNDS}.conformer.{index}"):
                yield weight._replace(name=renamed(weight.name))
        yield from self.embedder.weights()


def renamed(name: str) -> str:
    """The name of a layer's weight in checkpoints."""
    for theirs, ours in LAYER_NAMES:
        name = name.replace(theirs, ours)
    return name


class CausalHalving:
    """A convolution of 3 x 3 that halves the number of frames and of bands; then a norm, by the
    mean and the deviation of all numbers up to each frame."""

    def __init__(self, in_size: int, size: int, eps: float, ops: EncoderOps) -> None:
        self._eps = eps
        self._shape = (size, in_size, 3, 3)
        num_weights = math.prod(self._shape)
        self.kernel = ops.vector(num_weights, exact=True)
        self.norm = ops.vector(size, exact=True)

    def __call__(self, planes: Tensor) -> Tensor:
        """[channels, frames, bands] -> [channels, frames / 2, bands / 2]"""
        # A frame is read with the two that follow it, and zeros are after the last one.
        padded = F.pad(planes, (1, 1, 0, 2))
        kernel = self.kernel.view(self._shape)
        [found] = F.conv2d(padded[None], kernel, stride=2)
        by_frame = found.permute(1, 2, 0)
        means = _mean_so_far(by_frame)
        centred = by_frame - means
        spreads = _mean_so_far(centred.square())
        factors = torch.rsqrt(spreads + self._eps)
        normed = centred * factors
        bent = torch.relu(normed * self.norm)
        return bent.permute(2, 0, 1)

    def weights(self, prefix: str) -> Weights:
        yield vector(f"{prefix}.conv.weight", self.kernel, shape=self._shape)
        yield vector(f"{prefix}.norm.weight", self.norm)


def _mean_so_far(x: Tensor) -> Tensor:
    """[T, n, m] -> [T, 1, 1], the mean of all numbers up to each t."""
    flat = x.flatten(1)
    sums = flat.sum(1).cumsum(0)
    steps = torch.arange(len(x), device=x.device)
    counts = (steps + 1) * flat.shape[1]
    means = sums / counts
    return means[:, None, None]


class Embedder:
    """norm(W norm(x)) of vectors, and of the embeddings of tokens; the first norms differ."""

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int],
        eps: float,
        vocab: SpecialVocab,
        backend: TowerBackend,
    ) -> None:
        """`sizes` of a vector, before and after."""
        ops = backend.ops
        size, out_size = sizes
        self._name = name
        self._backend = backend
        self._ops = ops
        self.table = Embedding(vocab.num_tokens, size, ops)
        self.token_norm = _norm(size, eps, ops)
        self.vector_norm = _norm(size, eps, ops)
        self.projection = Linear(size, {"embedding_projection": out_size}, False, ops)
        self._last_norm = plain_norm(out_size, eps, ops)

    def __call__(self, vectors: Tensor) -> Tensor:
        found = self._backend.run(self._of_vectors, vectors)
        return found.float().clone()

    def of_tokens(self, rows: list[int]) -> Tensor:
        """Of rows of the table."""
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.table.matrix)
        index = torch.tensor(rows, device=self._backend.device)
        embedded = table.rows(index)
        found = self._backend.run(self._of_tokens, embedded)
        return found.float().clone()

    def _of_vectors(self, x: Tensor) -> Tensor:
        return self._finish(self.vector_norm(x))

    def _of_tokens(self, x: Tensor) -> Tensor:
        return self._finish(self.token_norm(x))

    def _finish(self, x: Tensor) -> Tensor:
        ops = self._ops
        projected = ops.computed(self.projection(x))
        normed = ops.norm(projected, self._last_norm)
        return ops.computed(normed)

    def weights(self) -> Weights:
        yield from self.table.weights(f"{self._name}.embedding")
        yield from self.token_norm.weights(f"{self._name}.hard_embedding_norm")
        yield from self.vector_norm.weights(f"{self._name}.soft_embedding_norm")
        yield from self.projection.weights(self._name)


def _norm(size: int, eps: float, ops: EncoderOps) -> RmsNorm:
    return RmsNorm(size, eps, ops, kind=NormKind.RMS_EXACT)

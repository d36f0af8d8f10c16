"""Whisper's encoder of sounds: followed by keys and values for every layer of the decoder, as in
Whisper, or by a matrix, as in Qwen2-Audio."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.vision.sound import KERNEL, SpeechSpec, WhisperSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.linear import Linear
from weft.models.layers.norm import CenteredNorm
from weft.models.layers.weight import Weights
from weft.models.vision.layer import QKV, VIT, LayerShape, TowerLayer
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.models.vision.vit import patch_weight
from weft.ops.encoder import EncoderOps
from weft.ops.plain import PlainMatrix

LAYER = VIT._replace(attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm", mlp="")


class WhisperEncoder:
    """Convolutions, positions, layers and a last norm. `name`: of the encoder in checkpoints."""

    def __init__(self, spec: WhisperSpec, backend: TowerBackend, name: str) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self._name = name
        self._attention = backend.make_attention(spec.num_heads, spec.head_dim)
        self.first = Convolution(spec.num_bands, hidden, spec.activation, ops)
        self.second = Convolution(hidden, hidden, spec.activation, ops)
        self.positions = Embedding(spec.num_positions, hidden, ops)
        self.layers = [self._layer() for _ in range(spec.num_layers)]
        self.last_norm = _norm(spec, ops)

    def encode(self, values: Tensor, num_places: int) -> Pieces:
        """The vectors [num_places, hidden], before the last norm, of values [bands, frames]."""
        run = self._backend.run
        # Zeros precede the first frame, and follow the last frame of the longest sound.
        padded = F.pad(values.t(), (0, 0, 1, 1))
        frames = padded[: 2 * num_places + 2]
        x = run(self._enter, windows(frames, 1))
        x = run(self._halve, windows(F.pad(x, (0, 0, 1, 0)), 2))
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        x = x + table.rows(torch.arange(num_places, device=x.device))
        self._attention.prepare([num_places])
        return (yield from self._backend.run_in_pieces(self._layers, x))

    def _layer(self) -> TowerLayer:
        """A layer whose keys have no bias."""
        spec = self._spec
        shape = LayerShape(spec.hidden_size, spec.inner_size, spec.activation, has_bias=True)
        norms = (_norm(spec, self._ops), _norm(spec, self._ops))
        layer = TowerLayer(shape, LAYER, norms, self._ops, self._attention)
        # Queries, keys and values are one matrix, which has a bias: zeros as the bias of the keys
        # change nothing.
        layer.qkv.matrix.put_bias(QKV.index("k_proj"), torch.zeros(spec.hidden_size))
        return layer

    def _enter(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.first(x))

    def _halve(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.second(x))

    def _layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self._ops.computed(x)

    def weights(self) -> Weights:
        name = self._name
        yield from self.first.weights(f"{name}.conv1")
        yield from self.second.weights(f"{name}.conv2")
        yield from self.positions.weights(f"{name}.embed_positions")
        for index, layer in enumerate(self.layers):
            for weight in layer.weights(f"{name}.layers.{index}"):
                if not weight.name.endswith("k_proj.bias"):
                    yield weight
        yield from self.last_norm.weights(f"{name}.layer_norm")


class WhisperTower:
    """Computes only the vectors of the sound itself: the padding up to the longest sound is
    silence, to which no vector attends."""

    def __init__(self, spec: WhisperSpec, backend: TowerBackend) -> None:
        self._spec = spec
        self._backend = backend
        self._ops = backend.ops
        self.encoder = WhisperEncoder(spec, backend, "audio_tower")
        self.projection = Linear(spec.hidden_size, {"linear": spec.out_size}, True, backend.ops)

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [bands, frames]: the frames on which the vectors of the sound depend, an
        even number for the longest sound, else one more."""
        num_bands, num_frames = input.values.shape
        num_places = num_frames // 2
        if (
            num_bands != self._spec.num_bands
            or num_places > self._spec.num_positions
            or num_places // 2 != input.length
            or not input.length
        ):
            raise ValueError(
                f"a sound of {input.length} tokens has the shape {list(input.values.shape)}; this "
                f"encoder reads up to {2 * self._spec.num_positions} frames of "
                f"{self._spec.num_bands} bands, four or five for each token"
            )
        x = yield from self.encoder.encode(input.values, num_places)
        pairs = x[: 2 * input.length].view(input.length, 2, -1)
        return self._backend.run(self._project, pairs.mean(1))

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projection(self.encoder.last_norm(x)))

    def weights(self) -> Weights:
        yield from self.encoder.weights()
        yield from self.projection.weights("multi_modal_projector")


class SpeechTower:
    """Computes all vectors of the longest sound, because Whisper attends to the silence after a
    shorter one, too. Of each it returns keys and values for every layer of the decoder: [keys of
    the first layer | values of the first layer | keys of the second ..]."""

    def __init__(self, spec: SpeechSpec, backend: TowerBackend) -> None:
        encoder = spec.encoder
        hidden = encoder.hidden_size
        self._spec = encoder
        self._backend = backend
        self._ops = backend.ops
        self.encoder = WhisperEncoder(encoder, backend, "model.encoder")
        names = [
            f"{layer}.encoder_attn.{part}"
            for layer in range(spec.num_layers)
            for part in ("k_proj", "v_proj")
        ]
        self.keys_and_values = Linear(hidden, dict.fromkeys(names, hidden), True, backend.ops)
        for part in range(0, len(names), 2):  # keys have no bias
            self.keys_and_values.matrix.put_bias(part, torch.zeros(hidden))

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [bands, frames], all frames of the longest sound."""
        spec = self._spec
        shape = [spec.num_bands, 2 * spec.num_positions]
        if list(input.values.shape) != shape or input.length != spec.num_positions:
            raise ValueError(
                f"a sound of {input.length} vectors has the shape {list(input.values.shape)}; this "
                f"encoder reads {shape} and makes {spec.num_positions} vectors"
            )
        x = yield from self.encoder.encode(input.values, spec.num_positions)
        return (yield from self._backend.run_in_pieces(self._project, x))

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.keys_and_values(self.encoder.last_norm(x)))

    def weights(self) -> Weights:
        yield from self.encoder.weights()
        for weight in self.keys_and_values.weights("model.decoder.layers"):
            if not weight.name.endswith("k_proj.bias"):
                yield weight


class Convolution:
    """activation(W x + b) of neighbouring rows."""

    def __init__(self, in_size: int, out_size: int, activation: str, ops: EncoderOps) -> None:
        self._ops = ops
        self._in_size = in_size
        self._activation = activation
        self._inner = Linear(KERNEL * in_size, {"": out_size}, True, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """The output of `windows` -> [T, out_size]"""
        return self._ops.activated(x, self._inner.matrix, self._activation)

    def weights(self, prefix: str) -> Weights:
        _, bias = self._inner.weights(prefix)
        shape = (self._inner.matrix.sizes[0], self._in_size, KERNEL)
        yield patch_weight(f"{prefix}.weight", shape, self._inner.matrix)
        yield bias._replace(name=f"{prefix}.bias")


def windows(x: Tensor, step: int) -> Tensor:
    """Every `step`-th window of KERNEL neighbouring rows, as one row: [T, n] -> [(T - KERNEL) //
    step + 1, n * KERNEL], column after column of the window."""
    return x.unfold(0, KERNEL, step).flatten(1)


def _norm(spec: WhisperSpec, ops: EncoderOps) -> CenteredNorm:
    return CenteredNorm(spec.hidden_size, spec.norm_eps, ops, has_bias=True)

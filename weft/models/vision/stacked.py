"""Whisper's encoder of sounds, with a projection of stacked vectors to the decoder's tokens."""

from __future__ import annotations

from torch import Tensor

from weft.config.vision.stacked import StackedSpec
from weft.models.layers.weight import Weights
from weft.models.vision.layer import TwoProducts
from weft.models.vision.tower import Pieces, TowerBackend, TowerInput
from weft.models.vision.whisper import WhisperEncoder


class StackedTower:
    def __init__(self, spec: StackedSpec, backend: TowerBackend) -> None:
        self._spec = spec
        self._backend = backend
        self._ops = backend.ops
        self.encoder = WhisperEncoder(spec.encoder, backend, "audio_tower")
        sizes = (spec.stacked_size, spec.inner_size, spec.out_size)
        self.projection = TwoProducts(
            sizes, ("linear_1",), "linear_2", "gelu", backend.ops, has_bias=False
        )

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [bands, frames], all frames of a window."""
        spec = self._spec
        positions = spec.encoder.num_positions
        shape = [spec.encoder.num_bands, 2 * positions]
        if list(input.values.shape) != shape or input.length != spec.num_tokens:
            raise ValueError(
                f"a sound of {input.length} tokens has the shape {list(input.values.shape)}; this "
                f"encoder reads {shape} and makes {spec.num_tokens} tokens"
            )
        x = yield from self.encoder.encode(input.values, positions)
        x = self._backend.run(self._norm, x)
        stacked = x.reshape(spec.num_tokens, spec.stacked_size)
        return (yield from self._backend.run_in_pieces(self._project, stacked))

    def _norm(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.encoder.last_norm(x))

    def _project(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.projection(x))

    def weights(self) -> Weights:
        yield from self.encoder.weights()
        yield from self.projection.weights("multi_modal_projector")

"""What every encoder of pictures, videos or sounds can do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.models.layers.weight import Weights


class TowerInput(NamedTuple):
    """One picture, tile, stretch of a video, or sound."""

    kind: str  # image, video, audio
    length: int  # vectors that it becomes
    grid: tuple[int, int, int] | None  # how these lie in time, height and width; None: in a line
    values: Tensor  # float32, on the device of the tower, in the shape that the family reads


class Tower(Protocol):
    """An encoder with its projection to the hidden size of the decoder."""

    def encode(self, input: TowerInput) -> Tensor:
        """The vectors of one input, which depend on nothing else.

        Returns [input.length, (1 + K) * hidden size], in the type of the model: the first `hidden
        size` of a vector take the place of the token's embedding, each of the K following ones is
        added behind one of the first K layers (deepstack; usually K is 0).
        """
        ...

    def weights(self) -> Weights:
        """Every tensor that it wants from a checkpoint, by its name there."""
        ...

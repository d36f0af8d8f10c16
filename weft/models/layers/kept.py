"""What a model is asked to keep for a head that reads its hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeepStates(Protocol):
    """Keeps hidden states of a model's step for a head."""

    def reads(self, layer: int) -> bool:
        """Whether the head reads the input of this layer; the number of layers: the output of the
        last."""
        ...

    def keep(self, x: Tensor, layer: int) -> None:
        """Keep x [T, hidden], the input of a layer, for the step's tokens."""
        ...

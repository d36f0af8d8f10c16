"""RMS normalisation."""

from __future__ import annotations

from torch import Tensor

from weft.models.layers.weight import Empty, Weight, Weights
from weft.ops.elementwise import rms_norm


class RMSNorm:
    def __init__(self, size: int, eps: float, empty: Empty) -> None:
        self.weight = empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weights(self, prefix: str) -> Weights:
        yield Weight(f"{prefix}.weight", self.weight)

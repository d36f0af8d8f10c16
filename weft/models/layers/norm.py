"""RMS normalisation."""

from __future__ import annotations

from torch import Tensor

from weft.models.layers.weight import Weights, vector
from weft.ops.protocol import Norm, Ops


class RmsNorm:
    """x / rms(x) * weight, over the last dimension."""

    def __init__(
        self,
        size: int,
        eps: float,
        ops: Ops,
    ) -> None:
        self._ops = ops
        self.norm = Norm(ops.vector(size), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]"""
        return self._ops.norm(x, self.norm)

    def weights(self, prefix: str) -> Weights:
        yield vector(f"{prefix}.weight", self.norm.weight)

"""RMS normalisation."""

from __future__ import annotations

from weft.models.layers.weight import Weights, vector
from weft.ops.protocol import Norm, Ops


def rms_norm(size: int, eps: float, ops: Ops) -> Norm:
    return Norm(ops.vector(size), eps)


def norm_weights(norm: Norm, prefix: str) -> Weights:
    yield vector(f"{prefix}.weight", norm.weight)

"""Norms: by root mean square, or by mean and standard deviation."""

from __future__ import annotations

from torch import Tensor

from weft.config.decoder import NormKind
from weft.config.model import ModelConfig
from weft.models.layers.weight import Weights, vector
from weft.ops.protocol import LayerNorm, Norm, Ops


class RmsNorm:
    """x / rms(x) * weight, over the last dimension. Some checkpoints hold weight - 1; then 1 + w is
    kept in float32, because fewer bits would lose bits of w."""

    def __init__(
        self,
        size: int,
        eps: float,
        ops: Ops,
        *,
        kind: NormKind = NormKind.RMS,
    ) -> None:
        self._ops = ops
        self._plus = 1.0 if kind is NormKind.RMS_PLUS_ONE else 0.0
        is_exact = kind in (NormKind.RMS_PLUS_ONE, NormKind.RMS_EXACT)
        self.norm = Norm(ops.vector(size, exact=is_exact), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]"""
        return self._ops.norm(x, self.norm)

    def weights(self, prefix: str) -> Weights:
        yield vector(f"{prefix}.weight", self.norm.weight, plus=self._plus)


class CenteredNorm:
    """(x - mean(x)) / deviation(x) * weight + bias, over the last dimension."""

    def __init__(
        self,
        size: int,
        eps: float,
        ops: Ops,
        *,
        has_bias: bool,
        has_weight: bool = True,
        plus_one: bool = False,
    ) -> None:
        self._ops = ops
        self._has_weight = has_weight
        self._has_bias = has_bias
        self._plus = 1.0 if plus_one else 0.0
        self.norm = LayerNorm(ops.vector(size), ops.vector(size), eps)
        # The kernels always read both; values that the checkpoint lacks are set to change nothing.
        if not has_weight:
            self.norm.weight.fill_(1)
        if not has_bias:
            self.norm.bias.zero_()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]"""
        return self._ops.layer_norm(x, self.norm)

    def weights(self, prefix: str) -> Weights:
        if self._has_weight:
            yield vector(f"{prefix}.weight", self.norm.weight, plus=self._plus)
        if self._has_bias:
            yield vector(f"{prefix}.bias", self.norm.bias)


def make_norm(config: ModelConfig, size: int, ops: Ops, eps: float = 0.0) -> RmsNorm | CenteredNorm:
    """A norm of the decoder's kind. `eps` 0: that of the model."""
    kind = config.decoder.norm
    eps = eps or config.norm_eps
    if kind.has_mean:
        return CenteredNorm(
            size,
            eps,
            ops,
            has_bias=kind.has_bias,
            has_weight=kind is not NormKind.LAYER_PLAIN,
            plus_one=kind is NormKind.LAYER_PLUS_ONE_BIAS,
        )
    return RmsNorm(
        size,
        eps,
        ops,
        kind=kind,
    )

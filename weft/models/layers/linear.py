"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from weft.models.layers.weight import Empty, Weight, Weights


class Linear:
    """x Wᵀ + b for several projections of the same input at once.

    `parts` maps the name of each projection in the checkpoint to its output size; their rows stand one after the other
    in one matrix, so that reading x and calling the kernel is paid once.
    """

    def __init__(self, in_size: int, parts: Mapping[str, int], bias: bool, empty: Empty) -> None:
        self.sizes = tuple(parts.values())
        self.names = tuple(parts)
        self.weight = empty(sum(self.sizes), in_size)
        self.bias = empty(sum(self.sizes)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_size] -> [T, sum of sizes]"""
        return F.linear(x, self.weight, self.bias)

    def weights(self, prefix: str) -> Weights:
        for name, rows in zip(self.names, self.weight.split_with_sizes(self.sizes), strict=True):
            yield Weight(f"{prefix}.{name}.weight", rows)
        if self.bias is not None:
            for name, values in zip(self.names, self.bias.split_with_sizes(self.sizes), strict=True):
                yield Weight(f"{prefix}.{name}.bias", values)

"""Tensors that a graph computes with and that no step changes: norms, biases, sinks, and what the
model's code makes of them, as 1 + w. They stay where they are when weights change."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.transformers_backend.translate.evaluate import evaluated
from weft.models.transformers_backend.translate.graph import TracedValue


class Constants:
    """Computes the constants, and computes them again when weights have changed."""

    def __init__(self) -> None:
        self._made: dict[TracedValue, Tensor] = {}
        self._plain: dict[tuple[int, float], Tensor] = {}

    def vector(self, node: TracedValue | None, size: int, *, otherwise: float = 1.0) -> Tensor:
        """The content of a constant, float32 [size]; `otherwise`, where there is none."""
        if node is None:
            key = (size, otherwise)
            if key not in self._plain:
                self._plain[key] = torch.full((size,), otherwise)
            return self._plain[key]
        if node not in self._made:
            self._made[node] = torch.empty(size)
            self._fill(node)
        return self._made[node]

    @torch.inference_mode()
    def refresh(self) -> None:
        """Compute the constants again from weights that have changed."""
        for node in self._made:
            self._fill(node)

    def _fill(self, node: TracedValue) -> None:
        self._made[node].copy_(evaluated(node, {}, 1).flatten())

"""Constants: tensors of a graph that no step changes, such as norms, biases, sinks, and values that
the model's code derives from them (1 + w). They keep their addresses when weights change."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.transformers_backend.translate.evaluate import evaluated
from weft.models.transformers_backend.translate.graph import TracedValue


class Constants:
    """Computes the constants, and recomputes them after weights have changed."""

    def __init__(self) -> None:
        self._made: dict[TracedValue, Tensor] = {}
        self._plain: dict[tuple[int, float], Tensor] = {}

    def vector(self, node: TracedValue | None, size: int, *, otherwise: float = 1.0) -> Tensor:
        """The content of a constant, float32 [size]; filled with `otherwise` if `node` is None."""
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
        """Recompute the constants after weights have changed."""
        for node in self._made:
            self._fill(node)

    def _fill(self, node: TracedValue) -> None:
        self._made[node].copy_(evaluated(node, {}, 1).flatten())

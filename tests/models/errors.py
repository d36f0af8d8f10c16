"""How far two results are apart."""

from __future__ import annotations

import torch

TOLERANCE = 2e-5  # float32 sums of a few hundred terms, in another order


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())

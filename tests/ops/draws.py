"""How the tests of sampling draw: filters of many kinds, and columns of them as `SamplingArrays`
wants them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FILTERS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 0.5, 0.5),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (2.0, 700, 1.0, 0.0),
    (1.0, 100_000, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.999, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.7, 20, 0.8, 0.0),
    (1.0, 3_000, 0.6, 0.01),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (1e-7, 5, 0.9, 0.0),
    (1e30, 0, 0.9, 0.0),
]


@dataclass
class Columns:
    """`SamplingArrays` for tests."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    positions: NDArray[np.int32]

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(**{name: column[rows] for name, column in vars(self).items()})


def columns(filters: list[tuple[float, int, float, float]], first_seed: int = 0) -> Columns:
    """Each row with a seed of its own."""
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    count = np.arange(len(filters))
    return Columns(
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(min_p, np.float32),
        seeds=(count + first_seed) * 1_234_567_890_123 - 2**62,
        positions=(count * 7 % 1_000).astype(np.int32),
    )

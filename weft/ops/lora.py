"""Adapters (LoRA) in products: y = W x + scale B (A x) for the tokens of an adapter.

Adapters are known by place, 0, 1, ...; a token has the adapter of one place, or none. Torch is the
specification; the CPU kernels are in `cpp/lora.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.protocol import Matrix


class LoraPart(NamedTuple):
    """What an adapter adds to one part of a matrix."""

    a: Tensor  # [rank, in]
    b: Tensor  # [size of the part, rank]
    scale: float


# By matrix, for each of its parts; None: the adapter leaves it alone.
LoraParts: TypeAlias = Mapping[Matrix, Sequence[LoraPart | None]]


class AdapterOps(Protocol):
    """The adapters that products can add."""

    dtype: torch.dtype  # in which they are kept

    def watch(self, matrices: Sequence[Matrix]) -> None:
        """These are the matrices that adapters may change. Once, before anything is computed."""
        ...

    def put(self, place: int, parts: LoraParts) -> None:
        """Keep an adapter in a place, instead of what was there. If it raises, nothing has
        changed."""
        ...

    def clear(self, place: int) -> None:
        """Forget the adapter in a place."""
        ...

    def begin(self, adapters: IntArray | None) -> None:
        """Products until the next call are of tokens with these adapters: [T] the place of each, or
        -1; None: no token has one."""
        ...


class TokensOf(NamedTuple):
    """The tokens of a step that have one adapter."""

    place: int
    tokens: Tensor  # [n] int64


class TorchAdapters:
    """Adapters of the matrices of `PlainOps`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._loaded: dict[int, LoraParts] = {}  # by place
        self._step: list[TokensOf] = []

    def watch(self, matrices: Sequence[Matrix]) -> None:
        """A matrix is looked up when it is used."""

    def put(self, place: int, parts: LoraParts) -> None:
        self._loaded[place] = {
            matrix: [self._there(part) for part in of_matrix] for matrix, of_matrix in parts.items()
        }

    def clear(self, place: int) -> None:
        self._loaded.pop(place, None)

    def begin(self, adapters: IntArray | None) -> None:
        self._step = []
        if adapters is None:
            return
        for place in np.unique(adapters[adapters >= 0]).tolist():
            tokens = torch.from_numpy(np.flatnonzero(adapters == place))
            self._step.append(TokensOf(place, tokens.to(self._device)))

    def add(self, y: Tensor, x: Tensor, matrix: Matrix) -> None:
        """Add to y [T, out] what the adapters of the step's tokens make of x [T, in]."""
        for place, tokens in self._step:
            parts = self._loaded[place].get(matrix, ())
            rows = None
            for part, columns in zip(parts, _columns(matrix.sizes), strict=False):
                if part is None:
                    continue
                if rows is None:
                    rows = x[tokens]
                added = part.scale * ((rows @ part.a.T) @ part.b.T)
                y[tokens, columns] += added

    def _there(self, part: LoraPart | None) -> LoraPart | None:
        if part is None:
            return None
        a = part.a.to(self._device, self.dtype)
        return LoraPart(a, part.b.to(self._device, self.dtype), part.scale)


def _columns(sizes: Sequence[int]) -> list[slice]:
    found = []
    begin = 0
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += size
    return found

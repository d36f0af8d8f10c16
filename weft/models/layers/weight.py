"""How a layer says which tensors of a checkpoint it wants, and where it wants them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor


class Weight(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    target: Tensor  # to be copied into; often a view of a part of a merged matrix


Weights: TypeAlias = Iterator[Weight]


class Empty(Protocol):
    """Makes a tensor without content; carries dtype and device through the constructors of a model."""

    def __call__(self, *size: int) -> Tensor: ...

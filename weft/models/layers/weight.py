"""How a layer says which tensors of a checkpoint it wants, and how it takes and gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from weft.ops.codes import CodeFormat, Codes


class Put(Protocol):
    def __call__(
        self,
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        """Take the content from row `start` on, of any float type. Matrices may come in pieces of
        `ROW_STEP` rows or multiples of it, and in eight bits with the scales of rows
        (`Matrix.put`); all else comes whole."""
        ...


class Get(Protocol):
    def __call__(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of rows as they are kept, which may be in fewer bits; whole unless it is a
        matrix."""
        ...


class KeepAs(Protocol):
    def __call__(self, format: CodeFormat) -> None:
        """Before any content comes: it will be codes of this format (`Matrix.keep_as`)."""
        ...


class PutCodes(Protocol):
    def __call__(self, codes: Codes, start: int = 0) -> None:
        """Take rows as codes, in pieces of `ROW_STEP` rows or multiples of it
        (`Matrix.put_codes`)."""
        ...


class Weight(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    put: Put
    get: Get
    keep_as: KeepAs | None = None  # for matrices, as the next one
    put_codes: PutCodes | None = None


Weights: TypeAlias = Iterator[Weight]


def vector(name: str, values: Tensor, *, plus: float = 0.0) -> Weight:
    """A weight that is kept as it comes, or with a number added to it."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert scales is None
        target = values[start : start + len(content)]
        target.copy_(content)
        if plus:
            target.add_(plus)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return values[start:stop] - plus if plus else values[start:stop].clone()

    return Weight(
        name,
        tuple(values.shape),
        put,
        get,
    )

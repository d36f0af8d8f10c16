"""Weights: the tensors of a checkpoint that a layer needs, and functions that write and read
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import Matrix


class Put(Protocol):
    def __call__(
        self,
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        """Write `content`, of any float type, from row `start` on. Matrices may come in pieces of
        `ROW_STEP` rows or multiples of it, and in eight bits with the scales of rows
        (`Matrix.put`); everything else comes whole."""
        ...


class Get(Protocol):
    def __call__(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of the stored rows, which may have fewer bits than the checkpoint; only matrices
        are read in parts."""
        ...


class KeepAs(Protocol):
    def __call__(self, format: CodeFormat, order: Tensor | None = None) -> None:
        """Called before any content comes: the content will be codes of this format, with the
        inputs in this order (`Matrix.keep_as`)."""
        ...


class PutCodes(Protocol):
    def __call__(self, codes: Codes, start: int = 0) -> None:
        """Write rows as codes, in pieces of `ROW_STEP` rows or multiples of it
        (`Matrix.put_codes`)."""
        ...


class Stack(NamedTuple):
    """The position of a weight in a tensor [n, rows, columns] (or [n, rows]) that holds several."""

    name: str
    shape: tuple[int, ...]
    matrix: int  # index in the first dimension
    first: int = 0  # first row of the weight in it
    # The tensor stores the weight as [columns, rows], inputs first.
    is_transposed: bool = False


class RowRun(NamedTuple):
    """Rows of a tensor that are rows of one part of a matrix."""

    part: int
    first: int  # first row in the part
    begin: int  # first row in the tensor
    size: int


class MatrixRows(NamedTuple):
    """The matrix rows that store a tensor."""

    matrix: Matrix
    runs: tuple[RowRun, ...]


class Weight(NamedTuple):
    """One tensor of a checkpoint, or part of one."""

    name: str
    shape: tuple[int, ...]
    put: Put
    get: Get
    keep_as: KeepAs | None = None  # for matrices, like the next field
    put_codes: PutCodes | None = None
    # Alternatives: tensors that may hold the weight instead of one with its own name.
    stacks: tuple[Stack, ...] = ()
    rows: MatrixRows | None = None  # if it is a projection, an embedding or a head


Weights: TypeAlias = Iterator[Weight]


def vector(
    name: str,
    values: Tensor,
    *,
    plus: float = 0.0,
    times: float = 1.0,
    shape: tuple[int, ...] = (),
) -> Weight:
    """A weight that is stored as it comes, or with `plus` added, or multiplied by `times`. `shape`
    is the shape in checkpoints, if it has more than one dimension there."""

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert scales is None
        if shape:
            content = content.flatten()
        target = values[start : start + len(content)]
        target.copy_(content)
        if plus:
            target.add_(plus)
        if times != 1:
            target.mul_(times)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        if shape:
            return values.clone().view(shape)
        return values[start:stop].clone() / times - plus

    return Weight(
        name,
        shape or tuple(values.shape),
        put,
        get,
    )

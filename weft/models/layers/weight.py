"""How a layer says which tensors of a checkpoint it wants, and how it takes and gives them."""

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
    def __call__(self, format: CodeFormat, order: Tensor | None = None) -> None:
        """Before any content comes: it will be codes of this format, with its inputs in this order
        (`Matrix.keep_as`)."""
        ...


class PutCodes(Protocol):
    def __call__(self, codes: Codes, start: int = 0) -> None:
        """Take rows as codes, in pieces of `ROW_STEP` rows or multiples of it
        (`Matrix.put_codes`)."""
        ...


class Stack(NamedTuple):
    """Where a weight lies in a tensor [n, rows, columns] (or [n, rows]) that holds several."""

    name: str
    shape: tuple[int, ...]
    place: int  # in the first dimension
    first: int = 0  # row of it with which the weight begins
    # The weight is [columns, rows]: its values lie with the inputs first.
    is_transposed: bool = False


class RowRun(NamedTuple):
    """Rows of a tensor that are rows of one part of a matrix."""

    part: int
    first: int  # row of the part
    begin: int  # row of the tensor
    size: int


class MatrixRows(NamedTuple):
    """Where the rows of a tensor are kept."""

    matrix: Matrix
    runs: tuple[RowRun, ...]


class Weight(NamedTuple):
    """One tensor of a checkpoint, or a part of one."""

    name: str
    shape: tuple[int, ...]
    put: Put
    get: Get
    keep_as: KeepAs | None = None  # for matrices, as the next one
    put_codes: PutCodes | None = None
    # Tensors of which one may hold it, in place of one with its own name.
    stacks: tuple[Stack, ...] = ()
    rows: MatrixRows | None = None  # of a projection, an embedding or a head


Weights: TypeAlias = Iterator[Weight]


def vector(
    name: str,
    values: Tensor,
    *,
    plus: float = 0.0,
    shape: tuple[int, ...] = (),
) -> Weight:
    """A weight that is kept as it comes, or with a number added to it. `shape` is that in
    checkpoints, where it has more than one dimension."""

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

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        if shape:
            return values.clone().view(shape)
        return values[start:stop] - plus if plus else values[start:stop].clone()

    return Weight(
        name,
        shape or tuple(values.shape),
        put,
        get,
    )

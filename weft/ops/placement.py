"""Placement: what this process has of a model that several processes share.

    Placement      all of the model                                (the usual case: `UNSPLIT`)
    Sharded        a part of each divided weight                   (`sharding.py`)
    ExpertsApart   some experts of each layer, and all the rest    (`expert_parallel.py`)
    Staged         some consecutive layers                         (`stages.py`)

The `Ops` of a device ask their placement when they make weights. A weight that is stored in part is
a `PlacedMatrix`; with such a weight, `Ops` do a joint operation with the other processes:
`joint.py` in torch, `cpp/joint.py` in programs. So there is one `Ops` per device, whatever the
placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from weft.ops.lora import LoraPart, LoraParts, LoraTables, Ranks
from weft.ops.protocol import LayerRange, Matrix, Shard


class MakeMatrix(Protocol):
    def __call__(self, in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
        """Make a matrix of these sizes in this process."""
        ...


class MakeExperts(Protocol):
    def __call__(
        self, num_experts: int, in_size: int, sizes: tuple[int, ...], bias: bool
    ) -> Matrix:
        """Make the matrices of this number of experts in this process."""
        ...


class Placement:
    """All of the model. A subclass replaces what differs in its way of sharing."""

    @property
    def part(self) -> tuple[str | int, ...]:
        """Which part of the model this process has; processes with equal parts have the same
        content."""
        return ()

    def matrix(
        self,
        make: MakeMatrix,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        """The matrix with these sizes, of which `make` makes what this process has."""
        return make(in_size, sizes, bias)

    def expert_matrix(
        self,
        make: MakeExperts,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        """The same for the matrices of all experts; each expert has parts of these sizes."""
        return make(num_experts, in_size, sizes, bias)

    def of_heads(self, values: Tensor) -> Tensor:
        """`Ops.of_heads`"""
        return values

    def layer_range(self, num_layers: int) -> LayerRange:
        """`Ops.layer_range`"""
        return LayerRange(range(num_layers), is_first=True, is_last=True)


UNSPLIT = Placement()


class PlacedMatrix(ABC):
    """A `Matrix` of which this process stores only a part, `local`. It has the sizes of the unsplit
    matrix, takes rows of it, and returns NaN for values of other processes."""

    local: Matrix | None  # None: other processes store all of it
    sizes: tuple[int, ...]
    is_summed = False  # whether products are terms of a sum over all processes

    @property
    def tensors(self) -> Sequence[Tensor]:
        return () if self.local is None else self.local.tensors

    @abstractmethod
    def adapted(self, parts: Sequence[LoraPart | None]) -> Sequence[LoraPart | None]:
        """The parts of an adapter for `local`, from those for the unsplit matrix."""

    @abstractmethod
    def adapted_rows(self, part: LoraPart) -> LoraPart:
        """The same for the rows of a table."""


def local_matrix(matrix: Matrix) -> Matrix:
    """The matrix with which this process computes."""
    if not isinstance(matrix, PlacedMatrix):
        return matrix
    assert matrix.local is not None, "another process computes with this matrix"
    return matrix.local


def is_summed(matrix: Matrix) -> bool:
    return isinstance(matrix, PlacedMatrix) and matrix.is_summed


# Adapters


def local_ranks(ranks: Ranks) -> Ranks:
    """The ranks of the matrices with which this process computes."""
    return {local_matrix(matrix): rank for matrix, rank in ranks.items() if is_here(matrix)}


def local_parts(parts: LoraParts) -> LoraParts:
    """The parts of an adapter for the matrices of this process."""
    found: dict[Matrix, Sequence[LoraPart | None]] = {}
    for matrix, of_matrix in parts.items():
        if not is_here(matrix):
            continue
        if isinstance(matrix, PlacedMatrix):
            of_matrix = matrix.adapted(of_matrix)
        found[local_matrix(matrix)] = of_matrix
    return found


def local_rows(tables: LoraTables) -> LoraTables:
    """The same for the rows of tables."""
    found: dict[Matrix, LoraPart] = {}
    for table, part in tables.items():
        if not is_here(table):
            continue
        if isinstance(table, PlacedMatrix):
            part = table.adapted_rows(part)
        found[local_matrix(table)] = part
    return found


def is_here(matrix: Matrix) -> bool:
    """Whether this process computes with the matrix."""
    return not isinstance(matrix, PlacedMatrix) or matrix.local is not None

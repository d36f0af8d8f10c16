"""Tensor parallelism: processes, called ranks, each hold a part of every divided weight.

    outputs divided                     inputs divided
    W x = | W0 x |  rank 0              W x = W0 x0 + W1 x1
          | W1 x |  rank 1                    rank 0   rank 1

A product whose outputs are divided gives each rank a part of y. A product whose inputs are divided
takes such a part and gives each rank a term; y is the sum of all terms. So ranks sum after every
second product of a layer. Names of tensors, files and formats are those of the unsplit weight:
`ShardedMatrix` takes rows of the unsplit weight and stores the part of its rank.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.ops.codes import COARSE, CodeFormat, Codes, Scales
from weft.ops.lora import LoraPart
from weft.ops.placement import MakeExperts, MakeMatrix, PlacedMatrix, Placement
from weft.ops.protocol import Divided, Matrix, Shard


class CannotShard(ValueError):
    """Stored codes cannot be divided between ranks; the message gives the reason."""


class GroupRank(NamedTuple):
    """This process among the ranks."""

    rank: int  # 0..size-1
    size: int


class Collective(Protocol):
    """Collective operations of all ranks. Every rank calls the same functions in the same order,
    with tensors of the same sizes. Each call raises `RankLost` if another rank does not take
    part."""

    rank: int  # as in `GroupRank`
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by the sum of x over all ranks, added in the order of ranks where the
        implementation can choose the order. x is float32 and contiguous."""
        ...

    def gather(self, x: Tensor) -> Tensor | None:
        """The x of all ranks on rank 0, [size, *x.shape]; None on other ranks. x is contiguous."""
        ...

    def close(self) -> None:
        """Leave the group. No method is called afterwards."""
        ...


class RankLost(RuntimeError):
    """A rank has stopped taking part, so no further step can be computed."""


class Part(NamedTuple):
    """Consecutive rows or columns of the unsplit weight."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


def part_of(size: int, rank: int, num_ranks: int, unit: int = 1) -> Part:
    """The part of rank `rank` of `size` numbers that are divided in units of `unit` numbers.

    If there are fewer units than ranks, consecutive ranks share a unit. Otherwise all ranks have
    the same number of units; the parts of the last ranks may reach beyond the end (padding).
    """
    num_units = -(-size // unit)
    if num_units < num_ranks:
        return Part(rank * num_units // num_ranks * unit, unit)
    per_rank = -(-num_units // num_ranks) * unit
    return Part(rank * per_rank, per_rank)


class Sharded(Placement):
    """A part of each divided weight, and all of the others."""

    def __init__(self, group_rank: GroupRank) -> None:
        self._group_rank = group_rank

    @property
    def part(self) -> tuple[str | int, ...]:
        return ("sharded", *self._group_rank)

    def matrix(
        self,
        make: MakeMatrix,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        if shard is None:
            return make(in_size, sizes, bias)
        return self._divided(make, in_size, sizes, bias, shard)

    def expert_matrix(
        self,
        make: MakeExperts,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard | None,
    ) -> Matrix:
        """Each rank has a part of every expert."""
        if shard is None:
            return make(num_experts, in_size, sizes, bias)
        make_part = partial(make, num_experts)
        return self._divided(make_part, in_size, sizes, bias, shard, num_experts)

    def of_heads(self, values: Tensor) -> Tensor:
        part = part_of(len(values), *self._group_rank)
        return values[part.first : part.end]

    def _divided(
        self,
        make: MakeMatrix,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard,
        num_experts: int = 1,
    ) -> ShardedMatrix:
        rank, num_ranks = self._group_rank
        if shard.divided is Divided.INPUTS:
            local = make(part_of(in_size, rank, num_ranks).size, sizes, bias)
        else:
            parts = [part_of(size, rank, num_ranks, shard.unit) for size in sizes]
            local = make(in_size, tuple(part.size for part in parts), bias)
        unsplit = sizes * num_experts
        return ShardedMatrix(local, in_size, unsplit, shard, rank=rank, num_ranks=num_ranks)


class ShardedMatrix(PlacedMatrix):
    """`local` has the rows or columns of this rank."""

    local: Matrix

    def __init__(
        self,
        local: Matrix,
        in_size: int,
        sizes: tuple[int, ...],
        shard: Shard,
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.local = local
        self.sizes = sizes
        self.is_summed = shard.divided is Divided.INPUTS
        self._in_size = in_size
        self._rank = rank
        self._rows = [Part(0, size) for size in sizes]
        self._columns = Part(0, in_size)
        if self.is_summed:
            self._columns = part_of(in_size, rank, num_ranks)
        else:
            self._rows = [part_of(size, rank, num_ranks, shard.unit) for size in sizes]

    @property
    def rows(self) -> Sequence[Part]:
        """The rows of this rank, for each part of the matrix."""
        return self._rows

    def adapted(self, parts: Sequence[LoraPart | None]) -> Sequence[LoraPart | None]:
        """The outputs of B and the inputs of A that this rank has of the matrix. If inputs are
        divided, rank 0 adds the shift, so that the sum contains it once."""
        columns = self._columns
        found: list[LoraPart | None] = []
        for part, rows in zip(parts, self._rows, strict=True):
            if part is None:
                found.append(None)
                continue
            a = part.a[:, columns.first : columns.end].contiguous()
            b = part.b[rows.first : rows.end].contiguous()
            shift = part.shift if self._rank == 0 or not self.is_summed else None
            of_rows = slice(rows.first, rows.end)
            found.append(
                LoraPart(
                    a,
                    b,
                    part.scale,
                    None if part.gain is None else part.gain[of_rows].contiguous(),
                    None if shift is None else shift[of_rows].contiguous(),
                )
            )
        return found

    def adapted_rows(self, part: LoraPart) -> LoraPart:
        (rows,) = self._rows
        return part._replace(a=part.a[:, rows.first : rows.end].contiguous())

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        here = self._here(part, start, len(rows))
        if here is None:
            return
        columns = slice(self._columns.first, self._columns.end)
        self.local.put(
            part,
            rows[here, columns],
            start + here.start - self._rows[part].first,
            None if scales is None else scales[here],
        )

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        if self.is_summed:
            self._check(format, order)
        self.local.keep_as(part, format, order)

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        here = self._here(part, start, len(codes.values))
        if here is None:
            return
        codes = codes.of(here)
        if self.is_summed:
            codes = _columns_of(codes, self._columns)
        self.local.put_codes(part, codes, start + here.start - self._rows[part].first)

    def get(self, part: int, start: int = 0, stop: int | None = None) -> Tensor:
        size = self.sizes[part]
        stop = size if stop is None else min(stop, size)
        unsplit = torch.full((max(stop - start, 0), self._in_size), torch.nan)
        here = self._here(part, start, len(unsplit))
        if here is not None:
            first = start + here.start - self._rows[part].first
            # `local.get` reads from a multiple of ROW_STEP on; a shard may begin elsewhere.
            found = self.local.get(part, 0, first + here.stop - here.start)[first:]
            unsplit[here, self._columns.first : self._columns.end] = found.to(unsplit)
        return unsplit

    def put_bias(self, part: int, values: Tensor) -> None:
        if self.is_summed:
            # Only rank 0 adds the bias, so that the sum contains it once.
            self.local.put_bias(part, values if self._rank == 0 else torch.zeros_like(values))
            return
        rows = self._rows[part]
        mine = values[rows.first : rows.end]
        self.local.put_bias(part, _filled_up(mine, rows.size))

    def get_bias(self, part: int) -> Tensor:
        bias = self.local.get_bias(part)
        unsplit = torch.full((self.sizes[part],), torch.nan)
        if self.is_summed:
            if self._rank == 0:
                unsplit.copy_(bias)
            return unsplit
        rows = self._rows[part]
        mine = unsplit[rows.first : rows.end]
        mine.copy_(bias[: len(mine)])
        return unsplit

    def _here(self, part: int, start: int, num_rows: int) -> slice | None:
        """The slice of the rows from `start` on that belongs to this rank; None if it is empty."""
        rows = self._rows[part]
        first = max(start, rows.first)
        end = min(start + num_rows, rows.end)
        if first >= end:
            return None
        return slice(first - start, end - start)

    def _check(self, format: CodeFormat, order: Tensor | None) -> None:
        """Raises CannotShard if codes of this format cannot be divided between these inputs."""
        size = self._columns.size
        if order is not None:
            raise CannotShard("its codes stand in an order of their own (act order)")
        step = COARSE if format.is_coarse else format.group
        if step and size % step:
            raise CannotShard(
                f"its {self._in_size:,} inputs are divided into {size:,}, and its codes can only "
                f"be divided between groups of {step}"
            )


def _columns_of(codes: Codes, part: Part) -> Codes:
    group = codes.format.group
    mins = codes.mins
    return codes._replace(
        values=codes.values[:, part.first : part.end],
        scales=_groups_of(codes.scales, part, group),
        mins=None if mins is None else _groups_of(mins, part, group),
    )


def _groups_of(scales: Scales, part: Part, group: int) -> Scales:
    if not group:
        return scales
    fine = scales.fine[:, part.first // group : part.end // group]
    coarse = scales.coarse
    if coarse is not None:
        coarse = coarse[:, part.first // COARSE : part.end // COARSE]
    return Scales(fine, coarse)


def _filled_up(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)))

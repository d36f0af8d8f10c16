"""`Ops` and adapters of one rank, in torch: the specification of `cpp/sharded.py`.

Products are those of `PlainOps`, with the rank's part of each weight. In addition, ranks exchange
data after a product whose inputs are divided, after the embedding, and after the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.elementwise import scaled_logits
from weft.ops.lora import NO_TABLES, AdapterOps, LoraPart, LoraParts, LoraTables, PutAdapter
from weft.ops.plain import PlainOps
from weft.ops.protocol import Divided, Experts, Matrix, Shard
from weft.ops.routing import Routed
from weft.ops.sharding import Collective, RankPlace, ShardedMatrix, part_of

MakeMatrix = Callable[[int, tuple[int, ...], bool], Matrix]  # in_size, sizes, bias


def shard_matrix(
    make: MakeMatrix,
    in_size: int,
    sizes: tuple[int, ...],
    bias: bool,
    shard: Shard,
    place: RankPlace,
    num_experts: int = 1,
) -> ShardedMatrix:
    """A matrix of which `make` makes this rank's part. Each of the experts has parts of `sizes`."""
    rank, num_ranks = place
    if shard.divided is Divided.INPUTS:
        local = make(part_of(in_size, rank, num_ranks).size, sizes, bias)
    else:
        parts = [part_of(size, rank, num_ranks, shard.unit) for size in sizes]
        local = make(in_size, tuple(part.size for part in parts), bias)
    whole = sizes * num_experts
    return ShardedMatrix(local, in_size, whole, shard, rank=rank, num_ranks=num_ranks)


def part_of_heads(values: Tensor, place: RankPlace) -> Tensor:
    """The values of the rank's heads, from one value per head."""
    part = part_of(len(values), *place)
    return values[part.first : part.end]


class ShardedPlainOps(PlainOps):
    """Sums over ranks are computed in float32, whatever the type of activations."""

    def __init__(
        self,
        ranks: Collective,
        dtype: torch.dtype,
        device: torch.device,
        format: str = "",
    ) -> None:
        super().__init__(dtype, device, format)
        self._ranks = ranks
        self._place = RankPlace(ranks.rank, ranks.size)

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        def make(in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
            whole = super(ShardedPlainOps, self).matrix
            return whole(in_size, sizes, bias=bias, gated=gated, precise=precise)

        if shard is None:
            return make(in_size, sizes, bias)
        return shard_matrix(make, in_size, sizes, bias, shard, self._place)

    def of_heads(self, values: Tensor) -> Tensor:
        return part_of_heads(values, self._place)

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        if not isinstance(table, ShardedMatrix):
            return super().embed(tokens, table, vectors, scale, unknown_token)
        assert unknown_token is None, "only whole tables have a row for tokens that are none"
        (rows,) = table.rows
        places = tokens - rows.first
        is_here = (places >= 0) & (places < rows.size)
        mine = super().embed(places.clamp(0, rows.size - 1), table.local)
        found = torch.where(is_here[:, None], mine.float(), 0)
        self._ranks.all_reduce(found)
        found = found.to(mine.dtype)
        if scale != 1:
            found = found * scale
        if vectors is None:
            return found
        index = (-1 - tokens).clamp(min=0)
        own = vectors[index, : found.shape[1]].to(found.dtype)
        return torch.where((tokens < 0)[:, None], own, found)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        if not isinstance(weight, ShardedMatrix):
            return super().linear(x, weight)
        y = super().linear(x, weight.local)
        if not weight.is_summed:
            return y
        total = y.float().contiguous()
        self._ranks.all_reduce(total)
        return total.to(y.dtype)

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        if not isinstance(experts.down, ShardedMatrix):
            return super().experts(x, routed, experts)
        local = experts._replace(gate_up=_local(experts.gate_up), down=_local(experts.down))
        total = super().experts(x, routed, local).float().contiguous()
        self._ranks.all_reduce(total)
        return total.to(x.dtype)

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
        places: Tensor | None = None,
    ) -> Tensor:
        """`Ops.logits` on rank 0; on other ranks, the logits of the rank's part of the
        vocabulary."""
        if not isinstance(weight, ShardedMatrix):
            return super().logits(x, weight, scale, cap, places)
        mine = self._product(x, weight.local, places).float().contiguous()
        found = self._ranks.gather(mine)
        if found is None:
            return mine
        (size,) = weight.sizes
        # [ranks, S, part] -> [S, vocabulary], without the padding of the last parts
        by_row = found.transpose(0, 1).reshape(len(mine), -1)
        whole = by_row[:, :size].contiguous()
        return scaled_logits(whole, scale, cap)


class ShardedAdapters:
    """The `AdapterOps` of one rank: adapters of its parts of the matrices."""

    def __init__(self, adapters: AdapterOps) -> None:
        self.dtype = adapters.dtype
        self._adapters = adapters

    def watch(self, matrices: Sequence[Matrix], tables: Sequence[Matrix] = ()) -> None:
        mine = [_local(matrix) for matrix in matrices]
        self._adapters.watch(mine, [_local(matrix) for matrix in tables])

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        mine = {}
        for matrix, of_matrix in parts.items():
            mine[_local(matrix)] = _parts_of(matrix, of_matrix)
        own_rows = {_local(matrix): _rows_of(matrix, part) for matrix, part in tables.items()}
        return self._adapters.prepare(mine, own_rows)

    def clear(self, place: int) -> None:
        self._adapters.clear(place)

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        self._adapters.begin(adapters, sampled)


def _local(matrix: Matrix) -> Matrix:
    return matrix.local if isinstance(matrix, ShardedMatrix) else matrix


def _rows_of(table: Matrix, part: LoraPart) -> LoraPart:
    """The part of an adapter that this rank needs, for its rows of the table."""
    if not isinstance(table, ShardedMatrix):
        return part
    (rows,) = table.rows
    return part._replace(a=part.a[:, rows.first : rows.end].contiguous())


def _parts_of(matrix: Matrix, parts: Sequence[LoraPart | None]) -> list[LoraPart | None]:
    """The parts of an adapter that this rank needs: the outputs of B and inputs of A that it has of
    the matrix."""
    if not isinstance(matrix, ShardedMatrix):
        return list(parts)
    columns = matrix.columns
    found: list[LoraPart | None] = []
    for part, rows in zip(parts, matrix.rows, strict=True):
        if part is None:
            found.append(None)
            continue
        a = part.a[:, columns.first : columns.end].contiguous()
        b = part.b[rows.first : rows.end].contiguous()
        found.append(LoraPart(a, b, part.scale))
    return found

"""`CppOps` of one rank. Sums and gathers over ranks are operations of the program, so that a step
stays one call of the library. `../sharded.py` is the specification."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps, PackedMatrix
from weft.ops.cpp.routes import Routes
from weft.ops.fusion import Product, Source, Value
from weft.ops.fusion import activation as activation_of
from weft.ops.protocol import Experts, Matrix, Norm, Shard
from weft.ops.routing import Routed
from weft.ops.sharded import part_of_heads, shard_matrix
from weft.ops.sharding import Collective, RankLost, RankPlace, ShardedMatrix

CHUNK_FLOATS = 1 << 18  # minimum size of a rank's buffer in shared memory


class SharedMemory(Protocol):
    """Memory that all ranks of a machine share. It is zero at first."""

    address: int
    num_bytes: int


class RankLink:
    """The connection of this rank's programs to the other ranks."""

    def __init__(
        self, place: RankPlace, timeout_s: float, memory: SharedMemory | None = None
    ) -> None:
        self.place = place
        self._memory = memory  # kept alive for the programs
        self._meetings = np.zeros(1, np.int64)
        self.struct = abi.RanksArgs(
            rank=place.rank,
            size=place.size,
            meetings=self._meetings.ctypes.data,
            timeout_ns=int(timeout_s * 1e9),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def by_memory(place: RankPlace, memory: SharedMemory, timeout_s: float) -> RankLink:
    """A link between ranks of one machine, through shared memory."""
    link = RankLink(place, timeout_s, memory)
    link.struct.shared = memory.address
    link.struct.chunk = (memory.num_bytes - abi.RANKS_HEAD_BYTES) // (2 * 4 * place.size)
    return link


def by_calls(collective: Collective, timeout_s: float) -> RankLink:
    """A link between ranks through torch: each operation of a program calls `collective`."""

    def call(what: int, data: int, num: int, out: int | None) -> int:
        mine = floats_at(data, num)
        try:
            if what == abi.RankAction.SUM:
                collective.all_reduce(mine)
                return 0
            found = collective.gather(mine)
        except RankLost:
            return 1
        if found is not None:
            assert out is not None, "rank 0 gathers into its own memory"
            floats_at(out, found.numel()).copy_(found.flatten())
        return 0

    link = RankLink(RankPlace(collective.rank, collective.size), timeout_s)
    link.struct.call = abi.RankCall(call)
    return link


def shared_bytes(num_ranks: int, widest: int) -> int:
    """Bytes of shared memory that ranks need. `widest`: length of the longest row that they sum or
    gather."""
    return abi.RANKS_HEAD_BYTES + 2 * 4 * num_ranks * max(CHUNK_FLOATS, widest)


class ShardedCppOps(CppOps):
    def __init__(
        self,
        ranks: RankLink,
        library: Library,
        format: WeightFormat,
        *,
        keeps_codes: bool = False,
    ) -> None:
        super().__init__(library, format, keeps_codes=keeps_codes)
        self._ranks = ranks

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
            whole = super(ShardedCppOps, self).matrix
            return whole(in_size, sizes, bias=bias, gated=gated, precise=precise)

        if shard is None:
            return make(in_size, sizes, bias)
        return shard_matrix(make, in_size, sizes, bias, shard, self._ranks.place)

    def expert_matrix(
        self,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        def make(in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
            whole = super(ShardedCppOps, self).expert_matrix
            return whole(num_experts, in_size, sizes, bias=bias, gated=gated)

        if shard is None:
            return make(in_size, sizes, bias)
        place = self._ranks.place
        return shard_matrix(make, in_size, sizes, bias, shard, place, num_experts)

    def of_heads(self, values: Tensor) -> Tensor:
        return part_of_heads(values, self._ranks.place)

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
        local = _packed(table)
        (panels,) = local.pieces
        (rows,) = table.rows
        out = self.recorder.buffer(local.in_size)
        args = abi.EmbedArgs(
            weight=panels.address,
            out=out.data_ptr(),
            first=rows.first,
            num_rows=rows.size,
        )
        if scale != 1:
            args.scale = scale
        self.record_embed(args, panels)
        self._sum(out)
        return activation_of(Value(out))

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        if not isinstance(weight, ShardedMatrix):
            return super().linear(x, weight)
        record = self._record_term if weight.is_summed else self._record_product
        return activation_of(Product(x, partial(record, _packed(weight))))

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        return super().gated(x, _local(weight), activation)

    def activated(self, x: Tensor, weight: Matrix, activation: str) -> Tensor:
        return super().activated(x, _local(weight), activation)

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        """Record this rank's part of each chosen expert, and the sum over ranks."""
        if not isinstance(experts.down, ShardedMatrix):
            return super().experts(x, routed, experts)
        local = experts._replace(gate_up=_local(experts.gate_up), down=_local(experts.down))
        record = partial(self._record_expert_terms, cast(Routes, routed), local)
        return activation_of(Product(self.computed(x), record))

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
        mine = super().logits(x, weight.local, scale, cap)
        args = abi.GatherRanksArgs(
            ranks=self._ranks.address,
            x=mine.data_ptr(),
            columns=mine.shape[1],
        )
        if self._ranks.place.rank:
            self.recorder.add(args)
            return mine
        (size,) = weight.sizes
        whole = self.recorder.buffer(size)
        args.out = whole.data_ptr()
        args.out_stride = whole.stride(0)
        args.out_columns = size
        self.recorder.add(args)
        return whole

    def _record_term(
        self,
        packed: PackedMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Record this rank's term of a product, and the sum over ranks."""
        assert norm is None, "a norm needs whole rows, and a rank has a part of each"
        y = self.recorder.buffer(packed.out_size)
        self.record_linear(Source(x, None), packed, y, Epilogue.STORE)
        return self._sum(y, add, scale)

    def _record_expert_terms(
        self,
        routes: Routes,
        experts: Experts,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        y = self.record_experts(routes, experts, x, norm, None, 1.0)
        return self._sum(y, add, scale)

    def _sum(self, x: Tensor, add: Tensor | None = None, scale: float = 1.0) -> Tensor:
        args = abi.SumRanksArgs(
            ranks=self._ranks.address,
            x=x.data_ptr(),
            columns=x.shape[1],
            scale=scale,
        )
        if add is not None:
            args.add = add.data_ptr()
            args.add_stride = add.stride(0)
        self.recorder.add(args)
        return x if add is None else add


def _local(weight: Matrix) -> Matrix:
    return weight.local if isinstance(weight, ShardedMatrix) else weight


def _packed(weight: ShardedMatrix) -> PackedMatrix:
    assert isinstance(weight.local, PackedMatrix)
    return weight.local


def floats_at(address: int, num: int) -> Tensor:
    """A float32 tensor [num] over the memory at `address`."""
    values = (ctypes.c_float * num).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(values))

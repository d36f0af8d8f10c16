"""What several processes that share a model compute together, as operations of programs, so that a
step stays one call of the library. `../joint.py` is the specification.

    ranks    sums and gathers: through shared memory within the library, or by calls of a collective
    peers    a program pauses to send tokens to other peers, and continues when it has the outputs
             of their experts
    stages   the operation of a sum without shared memory, which calls a Python function with a
             tensor, to read or to fill it
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import StepArgs
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program, ProgramRecorder
from weft.ops.cpp.routes import Routes
from weft.ops.expert_parallel import ExpertExchange
from weft.ops.muladd import fused_muladd, plain_muladd
from weft.ops.protocol import Experts
from weft.ops.sharding import Collective, GroupRank, RankLost
from weft.ops.stages import Pipe

FIRST_CAPACITY = 64  # rows of the first program of experts
X86 = ("x86_64", "AMD64")
CHUNK_FLOATS = 1 << 18  # minimum size of a rank's buffer in shared memory


class SharedMemory(Protocol):
    """Memory that all ranks of a machine share. It is zero at first."""

    address: int
    num_bytes: int


class RankLink:
    """The connection of this rank's programs to the other ranks."""

    def __init__(
        self, group_rank: GroupRank, timeout_s: float, memory: SharedMemory | None = None
    ) -> None:
        self.group_rank = group_rank
        self._memory = memory  # kept alive for the programs
        self._meetings = np.zeros(1, np.int64)
        self.struct = abi.RanksArgs(
            rank=group_rank.rank,
            size=group_rank.size,
            meetings=self._meetings.ctypes.data,
            timeout_ns=int(timeout_s * 1e9),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def by_memory(group_rank: GroupRank, memory: SharedMemory, timeout_s: float) -> RankLink:
    """A link between ranks of one machine, through shared memory."""
    link = RankLink(group_rank, timeout_s, memory)
    link.struct.shared = memory.address
    link.struct.chunk = (memory.num_bytes - abi.RANKS_HEAD_BYTES) // (2 * 4 * group_rank.size)
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

    link = RankLink(GroupRank(collective.rank, collective.size), timeout_s)
    link.struct.call = abi.RankCall(call)
    return link


def shared_bytes(num_ranks: int, widest: int) -> int:
    """Bytes of shared memory that ranks need. `widest`: length of the longest row that they sum or
    gather."""
    return abi.RANKS_HEAD_BYTES + 2 * 4 * num_ranks * max(CHUNK_FLOATS, widest)


@dataclass(frozen=True)
class PpLinks:
    """The handovers from the stage before and to the next one."""

    take: RankLink
    give: RankLink


def by_pipe(pipe: Pipe, timeout_s: float) -> PpLinks:
    return PpLinks(_calling(pipe.take, timeout_s), _calling(pipe.give, timeout_s))


@dataclass(frozen=True)
class CppJoint:
    """The `RecordedJoint` of this process, on its connections to others. It must live as long as
    the programs."""

    ranks: RankLink | None = None
    peers: ExpertExchange | None = None
    pipe_links: PpLinks | None = None
    # Without fused instructions, the kernels round after a product and after a sum.
    fuses: bool = True

    def sum(
        self,
        recorder: ProgramRecorder,
        x: Tensor,
        add: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        assert self.ranks is not None
        args = abi.SumRanksArgs(
            ranks=self.ranks.address,
            x=x.data_ptr(),
            columns=x.shape[1],
            scale=scale,
        )
        if add is not None:
            args.add = add.data_ptr()
            args.add_stride = add.stride(0)
        recorder.add(args)
        return x if add is None else add

    def gather(self, recorder: ProgramRecorder, x: Tensor, size: int) -> Tensor:
        assert self.ranks is not None
        args = abi.GatherRanksArgs(
            ranks=self.ranks.address,
            x=x.data_ptr(),
            columns=x.shape[1],
        )
        recorder.add(args)
        if self.ranks.group_rank.rank:
            return x
        gathered = recorder.buffer(size)
        args.out = gathered.data_ptr()
        args.out_stride = gathered.stride(0)
        args.out_columns = size
        return gathered

    def experts(
        self,
        recorder: ProgramRecorder,
        layer: int,
        x: Tensor,
        routes: Routes,
        y: Tensor,
        *,
        adds: bool,
        scale: float,
    ) -> None:
        # Views, not the tensors: holding the tensors would keep the recorder from reusing their
        # buffers for operations after this call.
        kept = routes._replace(experts=routes.experts[:], weights=routes.weights[:])
        recorder.call(partial(self._swap, layer, x[:], kept, y[:], adds=adds, scale=scale))

    def take(self, recorder: ProgramRecorder, x: Tensor) -> None:
        assert self.pipe_links is not None
        _call(recorder, self.pipe_links.take, x)

    def give(self, recorder: ProgramRecorder, x: Tensor) -> None:
        assert self.pipe_links is not None
        _call(recorder, self.pipe_links.give, x)

    def _swap(
        self,
        layer: int,
        x: Tensor,
        routes: Routes,
        y: Tensor,
        num_tokens: int,
        *,
        adds: bool,
        scale: float,
    ) -> None:
        """Let all peers compute the experts of the first `num_tokens` tokens, and add up their
        outputs as the kernel of experts does (`moe.h`)."""
        assert self.peers is not None
        experts = routes.experts[:num_tokens]
        rows = torch.empty(experts.numel(), x.shape[1])
        self.peers.exchange(layer, x[:num_tokens], experts, rows)
        each = rows.view(*experts.shape, -1).numpy()
        muladd = fused_muladd if self.fuses else plain_muladd
        total = np.zeros((num_tokens, x.shape[1]), np.float32)
        for rank in range(experts.shape[1]):
            weight = routes.weights[:num_tokens, rank : rank + 1].numpy()
            total = muladd(each[:, rank], weight, total)
        found = y[:num_tokens].numpy()
        factor = np.float32(scale)
        found[:] = muladd(total, factor, found) if adds else total * factor


def fuses(library: Library) -> bool:
    """Whether the kernels multiply and add with one rounding."""
    return library.instruction_set != "portable" or platform.machine() not in X86


def _call(recorder: ProgramRecorder, link: RankLink, x: Tensor) -> None:
    assert x.stride(0) == x.shape[1], "the rows are contiguous"
    args = abi.SumRanksArgs(
        ranks=link.address,
        x=x.data_ptr(),
        columns=x.shape[1],
        scale=1.0,
    )
    recorder.add(args)


def _calling(do: Callable[[Tensor], None], timeout_s: float) -> RankLink:
    link = RankLink(GroupRank(0, 1), timeout_s)
    link.struct.call = abi.RankCall(partial(_called, do))
    return link


def _called(do: Callable[[Tensor], None], what: int, data: int, num: int, out: int | None) -> int:
    try:
        do(floats_at(data, num))
    except RankLost:
        return 1
    return 0


def floats_at(address: int, num: int) -> Tensor:
    """A float32 tensor [num] over the memory at `address`."""
    values = (ctypes.c_float * num).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(values))


class LayerPrograms(NamedTuple):
    """The experts of all layers as programs for `capacity` rows, with shared buffers."""

    capacity: int
    x: Tensor  # [capacity, hidden]
    routes: Routes
    layers: Sequence[tuple[Program, Tensor]]  # each with its output [capacity, hidden]
    keep: Program  # owns the shared buffers


class CppExperts:
    """`ComputeExperts` with programs: each row is a token with one expert, of weight 1."""

    def __init__(self, ops: CppOps, layers: Sequence[Experts]) -> None:
        self._ops = ops
        self._layers = layers
        self._programs: LayerPrograms | None = None

    def __call__(self, layer: int, x: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
        num = len(rows)
        programs = self._with_room(max(num, len(x)))
        programs.x[: len(x)].copy_(x)
        routes = programs.routes
        chosen = experts.numpy()
        order = np.argsort(chosen, kind="stable")
        routes.experts.numpy()[:num, 0] = chosen
        routes.tokens.numpy()[:num, 0] = rows.numpy()[order]
        routes.sorted_rows.numpy()[order, 0] = np.arange(num, dtype=np.int32)
        counts = np.bincount(chosen, minlength=len(routes.offsets) - 1)
        routes.offsets.numpy()[1:] = np.cumsum(counts)
        program, output = programs.layers[layer]
        program.run(self._ops.library, StepArgs(num_tokens=num))
        return output[:num]

    def _with_room(self, num_rows: int) -> LayerPrograms:
        before = self._programs
        if before is not None and num_rows <= before.capacity:
            return before
        capacity = FIRST_CAPACITY if before is None else 2 * before.capacity
        self._programs = self._record(max(num_rows, capacity))
        return self._programs

    def _record(self, capacity: int) -> LayerPrograms:
        ops = self._ops
        ops.begin(capacity)
        recorder = ops.recorder
        x = recorder.buffer(self._layers[0].down.sizes[0])
        num_experts = max(len(experts.down.sizes) for experts in self._layers)
        routes = Routes(
            experts=recorder.buffer(1, torch.int32),
            weights=recorder.buffer(1).fill_(1.0),
            offsets=recorder.keep(torch.zeros(num_experts + 1, dtype=torch.int32)),
            tokens=recorder.buffer(1, torch.int32),
            sorted_rows=recorder.buffer(1, torch.int32),
        )
        layers = []
        for experts in self._layers:
            y = ops.record_experts(routes, experts, x, None, None, 1.0)
            layers.append((recorder.part(), y))
        return LayerPrograms(capacity, x, routes, layers, ops.finish())

"""`CppOps` of one of several peers, each of which has some of the experts. A program pauses to send
tokens to other peers, and continues when it has the outputs of their experts.
`../expert_parallel.py` is the specification.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program
from weft.ops.cpp.routes import Routes
from weft.ops.expert_parallel import ExpertExchange, ExpertLayers, PeerPlace, experts_of, layer_of
from weft.ops.muladd import fused_muladd, plain_muladd
from weft.ops.protocol import Experts, Matrix, Norm, Shard

FIRST_CAPACITY = 64  # rows of the first program of experts
X86 = ("x86_64", "AMD64")


class HostCall(NamedTuple):
    """A call on the host between two operations of a program; `do` gets the number of tokens."""

    place: int  # index of the operation that follows
    do: Callable[[int], None]


class InterruptedProgram(Program):
    """A program with calls of the host between its operations."""

    def __init__(self, whole: Program, calls: Sequence[HostCall]) -> None:
        super().__init__(whole.args, [whole])
        self._calls = calls

    def run(self, library: Library, step: StepArgs) -> None:
        begin = 0
        for call in self._calls:
            self.run_part(library, step, begin, call.place)
            call.do(step.num_tokens)
            begin = call.place
        self.run_part(library, step, begin, len(self.args))


class ExpertParallelCppOps(CppOps):
    def __init__(
        self,
        place: PeerPlace,
        exchange: ExpertExchange,
        library: Library,
        format: WeightFormat,
        *,
        keeps_codes: bool = False,
    ) -> None:
        super().__init__(library, format, keeps_codes=keeps_codes)
        self.layers = ExpertLayers(place)
        self._exchange = exchange
        self._calls: list[HostCall] = []
        # Without fused instructions, the kernels round after the product and after the sum.
        self._fuses = library.instruction_set != "portable" or platform.machine() not in X86

    def finish(self) -> Program:
        program = super().finish()
        if not self._calls:
            return program
        calls = self._calls
        self._calls = []
        return InterruptedProgram(program, calls)

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
        num_here = experts_of(num_experts, self.layers.place).size
        local = super().expert_matrix(num_here, in_size, sizes, bias=bias, gated=gated)
        return self.layers.own(local, num_experts, in_size, sizes)

    def record_experts(
        self,
        routes: Routes,
        experts: Experts,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        layer = layer_of(experts)
        if layer is None:
            return super().record_experts(routes, experts, x, norm, add, scale)
        assert norm is None, "the router has read the normed activation, so it is computed"
        y = self.recorder.buffer(experts.down.sizes[0]) if add is None else add
        # Views, not the tensors: holding the tensors would keep the recorder from reusing their
        # buffers for operations after this call.
        kept = routes._replace(experts=routes.experts[:], weights=routes.weights[:])
        swap = partial(self._swap, layer, x[:], kept, y[:], adds=add is not None, scale=scale)
        self._calls.append(HostCall(self.recorder.num_ops, swap))
        return y

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
        experts = routes.experts[:num_tokens]
        rows = torch.empty(experts.numel(), x.shape[1])
        self._exchange.exchange(layer, x[:num_tokens], experts, rows)
        each = rows.view(*experts.shape, -1).numpy()
        muladd = fused_muladd if self._fuses else plain_muladd
        total = np.zeros((num_tokens, x.shape[1]), np.float32)
        for rank in range(experts.shape[1]):
            weight = routes.weights[:num_tokens, rank : rank + 1].numpy()
            total = muladd(each[:, rank], weight, total)
        found = y[:num_tokens].numpy()
        factor = np.float32(scale)
        found[:] = muladd(total, factor, found) if adds else total * factor


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
        routes.places.numpy()[order, 0] = np.arange(num, dtype=np.int32)
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
            places=recorder.buffer(1, torch.int32),
        )
        layers = []
        for experts in self._layers:
            y = CppOps.record_experts(ops, routes, experts, x, None, None, 1.0)
            layers.append((recorder.part(), y))
        return LayerPrograms(capacity, x, routes, layers, ops.finish())

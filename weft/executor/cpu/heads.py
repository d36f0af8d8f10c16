"""Heads by the CPU kernels: what the model's programs keep for them, and their own programs, of
which all passes of a step run in one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.cpu.program_model import GrowingProgram, SizedProgram, record_after_body
from weft.executor.device import DeviceOutput, HostResult
from weft.executor.heads.ranks import one_each
from weft.executor.heads.states import HiddenPool
from weft.executor.runner import Run
from weft.models.heads.protocol import HeadModel
from weft.ops.cpp import abi
from weft.ops.cpp.ops import CppOps
from weft.plan.step import Plan, Result


class CppKept:
    """`KeepStates` for recorded programs."""

    def __init__(self, ops: CppOps, pool: HiddenPool) -> None:
        self._ops = ops
        self._pool = pool

    def reads(self, layer: int) -> bool:
        return layer in self._pool.spec.reads

    def keep(self, x: Tensor, layer: int) -> None:
        kept = self._pool.kept
        for columns in self._pool.columns_of(layer):
            args = abi.KeepRowsArgs(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                size=x.shape[1],
                kept=kept[:, columns].data_ptr(),
                kept_stride=kept.stride(0),
            )
            self._ops.recorder.add(args)


class CppSpread:
    """`Spread` for recorded programs."""

    def __init__(self, ops: CppOps) -> None:
        self._ops = ops

    def __call__(self, x: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        logits = self._ops.recorder.buffer(vocab_size)
        args = abi.SpreadArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            ids=ids.data_ptr(),
            num=len(ids),
            logits=logits.data_ptr(),
            vocab_size=vocab_size,
            stride=logits.stride(0),
        )
        self._ops.recorder.add(args)
        return logits


def single(steps: CpuFusedSteps) -> Run:
    """Steps that run one pass of a chain."""

    def compute(plan: Plan) -> DeviceOutput:
        return HostResult(Result(steps.guess(plan, one_each(plan))))

    return compute


@dataclass(frozen=True, slots=True)
class LaterPrograms:
    """The programs of the passes after the first one, as `FusedPrograms`."""

    body: GrowingProgram
    head: GrowingProgram


class HeadPrograms:
    """The programs of a head: `body` of the first pass, `later` of those after it, `head` from
    their outputs to logits."""

    def __init__(
        self, model: HeadModel, ops: CppOps, attention: CppPaged, states: HiddenPool
    ) -> None:
        self._model = model
        self._ops = ops
        self._attention = attention
        self._states = states
        hidden_size = states.carried.shape[1]
        self.carried = states.carried
        self.body = GrowingProgram(partial(self._record, is_first=True))
        self.later = GrowingProgram(partial(self._record, is_first=False))
        self.head = GrowingProgram(partial(record_after_body, ops, model.logits, hidden_size))

    def _record(self, capacity: int, *, is_first: bool) -> SizedProgram:
        self._ops.begin(capacity)
        states = self._states
        width = states.kept.shape[1] if is_first else states.carried.shape[1]
        received = self._ops.recorder.buffer(width)
        args = abi.TakeRowsArgs(size=width, out=received.data_ptr(), out_stride=received.stride(0))
        if is_first:
            args.kept = states.kept.data_ptr()
            args.kept_stride = states.kept.stride(0)
        else:
            args.carried = states.carried.data_ptr()
        self._ops.recorder.add(args)
        # A program takes tokens and positions from its step.
        nothing = torch.empty(0, dtype=torch.int64)
        output = self._model.forward(nothing, nothing, self._attention, received, is_first=is_first)
        return SizedProgram(self._ops.finish(), capacity, received, output)

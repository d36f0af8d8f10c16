"""Computes towers by the CPU kernels: each part becomes a program when it is first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.executor.cpu.encoder_attention import CppBidirectional
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.program import Program

Part = Callable[..., Tensor]


class PartProgram(NamedTuple):
    """A part, recorded with room for `capacity` rows."""

    program: Program
    capacity: int
    inputs: tuple[Tensor, ...]
    output: Tensor


class CppTowerAttention:
    """The `TowerAttention` of programs."""

    def __init__(self, inner: CppBidirectional) -> None:
        self._inner = inner

    @property
    def step(self) -> StepArgs:
        return self._inner.step

    def prepare(self, lens: Sequence[int]) -> None:
        self._inner.prepare(np.array(lens, np.int32), torch.device("cpu"))

    def forward(self, qkv: Tensor) -> Tensor:
        return self._inner.forward(qkv)


class CppTowerBackend:
    """The `TowerBackend` of the CPU kernels. Rows are float32."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, library: Library, format: WeightFormat) -> None:
        self.ops = CppEncoderOps(library, format)
        self._library = library
        self._attention: CppTowerAttention | None = None
        self._programs: dict[Part, PartProgram] = {}

    def make_attention(self, num_heads: int, head_dim: int) -> CppTowerAttention:
        assert self._attention is None, "a tower has one attention"
        self._attention = CppTowerAttention(CppBidirectional(num_heads, head_dim, self.ops))
        return self._attention

    def run(self, part: Part, *rows: Tensor) -> Tensor:
        num_rows = len(rows[0])
        program = self._program(part, num_rows, [one.shape[1] for one in rows])
        for place, one in zip(program.inputs, rows, strict=True):
            place[:num_rows].copy_(one)
        step = StepArgs() if self._attention is None else self._attention.step
        step.num_tokens = num_rows
        program.program.run(self._library, step)
        return program.output[:num_rows]

    def _program(self, part: Part, num_rows: int, sizes: Sequence[int]) -> PartProgram:
        """The program of a part with room for so many rows. Pictures of a model mostly have one
        size: there is no more room than was ever needed."""
        known = self._programs.get(part)
        if known is not None and num_rows <= known.capacity:
            return known
        self.ops.begin(num_rows)
        inputs = tuple(self.ops.recorder.buffer(size) for size in sizes)
        output = part(*inputs)
        recorded = PartProgram(self.ops.finish(), num_rows, inputs, output)
        self._programs[part] = recorded
        return recorded

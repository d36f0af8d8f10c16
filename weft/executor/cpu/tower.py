"""Computes towers with the CPU kernels: each part becomes a program in its first run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray
from weft.executor.cpu.encoder_attention import MOST_DIMS_OF_SHORTS, CppBidirectional
from weft.executor.cpu.tower_pieces import run_in_pieces
from weft.models.layers.encoder import EncoderHeads
from weft.models.vision.tower import Pieces, PlaneRotation, TowerHeads, at_once
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat, StepArgs, WeightFormat
from weft.ops.cpp.build import processor_flags
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.program import Program
from weft.ops.protocol import Norm

Part = Callable[..., Tensor]

# Instruction sets that multiply pairs of bfloat16 faster than as many floats.
PAIRS = ("avx512_bf16", "emulated_bf16")


class PausePoint(NamedTuple):
    """A point in a program at which other work is done, with rows that it has computed."""

    end: int  # index after the operations before it
    rows: Tensor
    do: Callable[[Tensor], None]


class PartProgram(NamedTuple):
    """A part of a tower, recorded with room for `capacity` rows."""

    program: Program
    pauses: tuple[PausePoint, ...]
    capacity: int
    inputs: tuple[Tensor, ...]
    output: Tensor


class CppTowerAttention:
    """The `TowerAttention` for recorded programs."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        ops: CppEncoderOps,
        rotation: PlaneRotation | None,
        kept: KvFormat,
    ) -> None:
        self._inner = CppBidirectional(num_heads, head_dim, ops, kept)
        self._ops = ops
        self._rotation = rotation
        self._places: IntArray = np.empty((3, 0), np.int32)  # `step` points to it
        self._num_heads = num_heads
        self._nothing = abi.KvCache(format=KvFormat.F32, kv_heads=0, head_dim=head_dim)
        self._axes = torch.empty(0)
        if rotation is not None:
            self._axes = rotation.axes.to(torch.uint8)

    @property
    def step(self) -> StepArgs:
        return self._inner.step

    def prepare(self, lens: Sequence[int], places: IntArray | None = None) -> None:
        self._inner.prepare(np.array(lens, np.int32), torch.device("cpu"))
        if places is not None:
            self._places = np.ascontiguousarray(places, np.int32)
            self.step.rotation = self._places.ctypes.data

    def forward(
        self,
        qkv: Tensor,
        heads: TowerHeads | None = None,
    ) -> Tensor:
        record = self._ops.recorder.add
        if heads is None:
            if self._rotation is not None:
                record(self._rotated(qkv, 2 * self._num_heads, None))
            return self._inner.forward(qkv)
        queries, keys, values = qkv.chunk(3, dim=1)
        record(self._rotated(queries, self._num_heads, heads.q_norm))
        record(self._rotated(keys, self._num_heads, heads.k_norm))
        record(self._normed(values, self._num_heads, heads.v_norm))
        return self._inner.forward(qkv, EncoderHeads(scale=heads.scale))

    def _rotated(
        self,
        x: Tensor,
        num_heads: int,
        norm: Norm | None,
    ) -> abi.RotaryStoreArgs:
        args = self._normed(x, num_heads, norm)
        if self._rotation is not None:
            args.rotary_dim = 2 * len(self._axes)
            args.cos = self._rotation.cos.data_ptr()
            args.sin = self._rotation.sin.data_ptr()
            args.axes = self._axes.data_ptr()
            args.side_by_side = self._rotation.side_by_side
        return args

    def _normed(
        self,
        x: Tensor,
        num_heads: int,
        norm: Norm | None,
    ) -> abi.RotaryStoreArgs:
        """Norms heads where they are. All are treated as queries, and nothing is stored."""
        args = abi.RotaryStoreArgs(
            cache=ctypes.addressof(self._nothing),
            qkv=x.data_ptr(),
            qkv_stride=x.stride(0),
            heads=num_heads,
        )
        if norm is not None:
            args.q_norm = norm.weight.data_ptr()
            args.eps = norm.eps
        return args


class CppTowerBackend:
    """The `TowerBackend` of the CPU kernels. Rows are float32."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, library: Library, format: WeightFormat) -> None:
        self.ops = CppEncoderOps(library, format)
        self.ops.may_round = format == WeightFormat.BF16
        self._format = format
        self._has_matrix_unit = "amx_bf16" in processor_flags()
        # A matrix unit attends to whole pictures alone.
        self._cuts_attention = not (self.ops.may_round and self._has_matrix_unit)
        self._library = library
        self._attention: CppTowerAttention | None = None
        self._programs: dict[Part, PartProgram] = {}
        self._pauses: list[PausePoint] = []  # of the part that is being recorded

    def make_attention(
        self, num_heads: int, head_dim: int, rotation: PlaneRotation | None = None
    ) -> CppTowerAttention:
        assert self._attention is None, "a tower has one attention"
        kept = self._kept_format(head_dim)
        self._attention = CppTowerAttention(num_heads, head_dim, self.ops, rotation, kept)
        return self._attention

    def _kept_format(self, head_dim: int) -> KvFormat:
        """How keys and values are kept for attention: in fewer bits where the weights are, and the
        processor multiplies them faster than floats."""
        if self._format == WeightFormat.I16 and head_dim <= MOST_DIMS_OF_SHORTS:
            return KvFormat.I16
        has_pairs = self._library.instruction_set in PAIRS and not self._has_matrix_unit
        if self._format == WeightFormat.BF16 and has_pairs:
            return KvFormat.BF16
        return KvFormat.F32

    def pause(self, x: Tensor, do: Callable[[Tensor], None]) -> None:
        rows = self.ops.computed(x)
        self._pauses.append(PausePoint(self.ops.recorder.num_ops, rows, do))

    def run(self, part: Part, *rows: Tensor) -> Tensor:
        return at_once(self._pieces(part, rows, is_unsplit=True))

    def run_in_pieces(self, part: Part, *rows: Tensor) -> Pieces:
        return self._pieces(part, rows, is_unsplit=False)

    def _pieces(self, part: Part, rows: Sequence[Tensor], *, is_unsplit: bool) -> Pieces:
        """`is_unsplit`: all operations up to a pause at once; else none of them is long."""
        num_rows = len(rows[0])
        program = self._program(part, num_rows, [one.shape[1] for one in rows])
        for buffer, one in zip(program.inputs, rows, strict=True):
            buffer[:num_rows].copy_(one)
        step = StepArgs() if self._attention is None else self._attention.step
        begin = 0
        for pause in (*program.pauses, None):
            end = len(program.program.args) if pause is None else pause.end
            step.num_tokens = num_rows
            if is_unsplit:
                program.program.run_part(self._library, step, begin, end)
                yield
            else:
                yield from self._in_pieces(program.program.args[begin:end], step)
            if pause is not None:
                pause.do(pause.rows[:num_rows])
            begin = end
        return program.output[:num_rows]

    def _in_pieces(self, ops: Sequence[ctypes.Structure], step: StepArgs) -> Iterator[None]:
        for args in ops:
            yield from run_in_pieces(self._library, args, step, cuts_attention=self._cuts_attention)

    def _program(self, part: Part, num_rows: int, sizes: Sequence[int]) -> PartProgram:
        """The program of a part with room for `num_rows` rows. Pictures of a model usually have one
        size, so the program gets no more room than needed."""
        known = self._programs.get(part)
        if known is not None and num_rows <= known.capacity:
            return known
        self.ops.begin(num_rows)
        inputs = tuple(self.ops.recorder.buffer(size) for size in sizes)
        self._pauses = []
        output = part(*inputs)
        pauses = tuple(self._pauses)
        recorded = PartProgram(self.ops.finish(), pauses, num_rows, inputs, output)
        self._programs[part] = recorded
        return recorded

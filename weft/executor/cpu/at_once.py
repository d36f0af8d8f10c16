"""The CPU kernels for models whose Python code runs in every step: matrix products and attention
are computed when they are called, instead of being recorded.

Inputs and outputs are tensors of the caller; the kernels get their addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.executor.backend import AttentionBatch
from weft.executor.cpu.attention import CppPaged
from weft.executor.kv_pool import KVPool
from weft.models.layers.attention import Heads
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, StepArgs, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.matrices import PackedMatrix
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.program import Program
from weft.ops.protocol import Matrix


class MatrixCall(NamedTuple):
    """The operations of a product; the addresses of activations are set in each call."""

    program: Program
    args: list[Any]  # abi.LinearArgs of each piece of the weight
    columns: list[int]  # output column where each piece begins


class CppProducts:
    """The `Products` of the CPU kernels. Activations are float32."""

    def __init__(self, library: Library, format: WeightFormat, *, keeps_codes: bool) -> None:
        self._library = library
        self.ops = CppOps(library, format, keeps_codes=keeps_codes)
        self._calls: dict[Matrix, MatrixCall] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._step = StepArgs()

    @property
    def tensors(self) -> list[Tensor]:
        return self.ops.tensors

    def vector(self, size: int, *, exact: bool = False) -> Tensor:
        return self.ops.vector(size, exact=exact)

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix:
        return self.ops.matrix(in_size, sizes, bias=bias, gated=gated, precise=precise)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        packed = cast(PackedMatrix, weight)
        call = self._calls.get(weight)
        if call is None:
            call = _matrix_call(packed)
            self._calls[weight] = call
        x = x.contiguous()
        num_rows = len(x)
        y = torch.empty(num_rows, packed.out_size)
        scratch = self._scratch_for(num_rows * (4 * packed.padded_in + 64))
        for args, column in zip(call.args, call.columns, strict=True):
            args.x = x.data_ptr()
            args.x_stride = x.shape[1]
            args.y = y.data_ptr() + 4 * column
            args.y_stride = packed.out_size
            args.scratch = scratch
        self._step.num_tokens = num_rows
        call.program.run(self._library, self._step)
        return y

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        packed = cast(PackedMatrix, table)
        (panels,) = packed.pieces
        tokens = tokens.contiguous()
        out = torch.empty(len(tokens), packed.in_size)
        args = abi.EmbedArgs(weight=panels.address, out=out.data_ptr())
        if scale != 1:
            args.scale = scale
        step = StepArgs(num_tokens=len(tokens), tokens=tokens.data_ptr())
        if vectors is not None:
            step.vectors = vectors.data_ptr()
            step.vectors_stride = vectors.stride(0)
        self._library.run_one(args, step)
        return out

    def computed(self, x: Tensor) -> Tensor:
        return x

    def _scratch_for(self, num_bytes: int) -> int:
        """The address of `num_bytes` of memory, which all products share."""
        if num_bytes + 64 > len(self._scratch):
            self._scratch = torch.empty(2 * num_bytes + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def _matrix_call(packed: PackedMatrix) -> MatrixCall:
    args: list[Any] = []
    columns: list[int] = []
    column = 0
    for panels in packed.pieces:
        linear = abi.LinearArgs(weight=panels.address, epilogue=Epilogue.STORE, scale=1.0)
        if packed.bias is not None:
            linear.bias = packed.bias[column:].data_ptr()
        args.append(linear)
        columns.append(column)
        column += panels.struct.out_size
    return MatrixCall(Program(args, [packed]), args, columns)


class CppPagedAtOnce:
    """The `AttentionBackend` of the CPU kernels that computes when it is called."""

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        library: Library,
        context_length: int,
    ) -> None:
        """Like `CppPaged`."""
        # Records a layer's operations, once.
        self._ops = CppOps(library, WeightFormat.F32)
        self._attention = CppPaged(config, pool, self._ops, context_length)
        self._library = library
        self._config = config
        self._programs: dict[int, Program] = {}  # by layer

    def prepare(self, batch: AttentionBatch) -> None:
        self._attention.prepare(batch)

    def forward(
        self,
        qkv: Tensor,
        heads: Heads,
        layer: int,
    ) -> Tensor:
        """Like `PagedAttention.forward`; each layer keeps the heads of its first call."""
        qkv = qkv.float()
        num_tokens = len(qkv)
        program = self._programs.get(layer)
        if program is None:
            self._ops.begin(1)
            self._attention.forward(self._ops.recorder.buffer(qkv.shape[1]), heads, layer)
            program = self._ops.finish()
            self._programs[layer] = program
        store, attend = cast(Any, program.args)
        _, head_dim = self._config.kv_shape(layer)
        out = torch.empty(num_tokens, self._config.num_heads * head_dim)
        store.qkv = qkv.data_ptr()
        store.qkv_stride = qkv.shape[1]
        attend.q = qkv.data_ptr()
        attend.q_stride = qkv.shape[1]
        attend.out = out.data_ptr()
        step = self._attention.step
        step.num_tokens = num_tokens
        program.run(self._library, step)
        return out

    def narrow(self, x: Tensor) -> Tensor:
        return x

"""`Ops` by the CPU kernels. Activations are float32; the functions add operations to the program
that is being recorded, and norms and sums become part of products (`../fusion.py`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.program import Program, ProgramRecorder
from weft.ops.fusion import (
    Normed,
    Product,
    Source,
    Value,
    activation,
    source_of,
    tensor_of,
)
from weft.ops.protocol import Matrix, Norm
from weft.ops.quantize import GROUP, widened

BYTES = {
    WeightFormat.F32: 4.0,
    WeightFormat.BF16: 2.0,
    WeightFormat.I8: 1.0,
    WeightFormat.I4: 0.5,
}


class PackedMatrix:
    """A weight in the panels of `program.h`. Parts of a gated one alternate panel by panel."""

    def __init__(
        self,
        library: Library,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        gated: bool,
        format: WeightFormat,
    ) -> None:
        self.sizes = sizes
        self.out_size = sum(sizes)
        self._library = library
        self._gated = gated
        if gated:
            gate, up = sizes
            assert gate == up, "the parts of a gated weight have one size"
            num_panels = 2 * -(-gate // abi.PANEL)
        else:
            num_panels = -(-self.out_size // abi.PANEL)
        self.padded_in = -(-in_size // abi.IN_STEP) * abi.IN_STEP
        num_outputs = num_panels * abi.PANEL
        self._panels = _zeros(int(num_outputs * self.padded_in * BYTES[format]))
        num_scales = {
            WeightFormat.I8: num_outputs,
            WeightFormat.I4: num_outputs * self.padded_in // GROUP,
        }
        self._scales = torch.zeros(num_scales.get(format, 0))
        self._sums = torch.zeros(num_outputs if format == WeightFormat.I8 else 0, dtype=torch.int32)
        self.bias = torch.zeros(num_outputs) if bias else None
        self.struct = abi.PackedWeight(
            format=format,
            in_size=in_size,
            out_size=self.out_size,
            padded_in=self.padded_in,
            group=GROUP,
            panels=self._panels.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    @property
    def tensors(self) -> Sequence[Tensor]:
        tensors = [self._panels, self._scales, self._sums]
        if self.bias is not None:
            tensors.append(self.bias)
        return tensors

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert start + len(rows) <= self.sizes[part]
        rows = widened(rows, scales)
        assert rows.shape[1] == self.struct.in_size
        # The kernels pack rows of bfloat16 and of float32.
        if rows.dtype != torch.bfloat16:
            rows = rows.float()
        rows = rows.contiguous()
        self._library.pack(self._pack_args(part, rows, start))

    def keep_as(self, part: int, format: CodeFormat) -> None:
        """Codes are widened here."""

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        self.put(part, codes.dequantized(), start)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        num_rows = len(range(self.sizes[part])[start:stop])
        rows = torch.empty(num_rows, self.struct.in_size)
        self._library.unpack(self._pack_args(part, rows, start))
        return rows

    def put_bias(self, part: int, values: Tensor) -> None:
        assert self.bias is not None
        self._bias_part(self.bias, part).copy_(
            _in_panels(values.float()) if self._gated else values
        )

    def get_bias(self, part: int) -> Tensor:
        assert self.bias is not None
        padded = self._bias_part(self.bias, part).flatten()
        return padded[: self.sizes[part]].clone()

    def _bias_part(self, bias: Tensor, part: int) -> Tensor:
        if self._gated:
            return bias.view(-1, 2, abi.PANEL)[:, part]
        return bias[: self.out_size].split_with_sizes(self.sizes)[part]

    def _pack_args(
        self,
        part: int,
        rows: Tensor,
        start: int,
    ) -> abi.PackArgs:
        if self._gated:
            # Panels of the two parts alternate: panel 2 j is the gate's, panel 2 j + 1 the up's.
            panel, within = divmod(start, abi.PANEL)
            first_row = (2 * panel + part) * abi.PANEL + within
        else:
            first_row = sum(self.sizes[:part]) + start
        return abi.PackArgs(
            weight=self.address,
            matrix=rows.data_ptr(),
            matrix_is_bf16=rows.dtype == torch.bfloat16,
            num_rows=len(rows),
            first_row=first_row,
            interleave=2 if self._gated else 1,
        )


class CppOps:
    """Records into `recorder`; `recording` begins, `finish` ends a program."""

    def __init__(self, library: Library, format: WeightFormat) -> None:
        """`format` of the weights; what must be precise gets at least eight bits."""
        self.library = library
        self.tensors: list[Tensor] = []
        self._format = format
        self._recorder: ProgramRecorder | None = None

    @property
    def recorder(self) -> ProgramRecorder:
        assert self._recorder is not None, "nothing is being recorded"
        return self._recorder

    def begin(self, capacity: int) -> None:
        """Record what follows, for steps of up to `capacity` tokens."""
        self._recorder = ProgramRecorder(capacity)

    def finish(self) -> Program:
        program = self.recorder.finish()
        self._recorder = None
        return program

    def vector(self, size: int) -> Tensor:
        self.tensors.append(torch.empty(size))
        return self.tensors[-1]

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix:
        format = WeightFormat.I8 if precise and self._format == WeightFormat.I4 else self._format
        packed = PackedMatrix(
            self.library,
            in_size,
            sizes,
            bias,
            gated,
            format,
        )
        self.tensors += packed.tensors
        return packed

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Recorded once for steps with and without vectors: those are the step's."""
        packed = cast(PackedMatrix, table)
        out = self.recorder.buffer(packed.struct.in_size)
        self.recorder.add(abi.EmbedArgs(weight=packed.address, out=out.data_ptr()))
        return activation(Value(out))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return activation(Normed(x, norm, self._record_norm))

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        record = partial(self._record_product, cast(PackedMatrix, weight))
        return activation(Product(x, record))

    def gated(self, x: Tensor, weight: Matrix) -> Tensor:
        packed = cast(PackedMatrix, weight)
        y = self.recorder.buffer(packed.sizes[0])
        self.record_linear(
            source_of(x),
            packed,
            y,
            Epilogue.GATED_SILU,
        )
        return activation(Value(y))

    def logits(self, x: Tensor, weight: Matrix) -> Tensor:
        return self.computed(self.linear(x, weight))

    def computed(self, x: Tensor) -> Tensor:
        return tensor_of(x)

    def record_linear(
        self, source: Source, packed: PackedMatrix, y: Tensor, epilogue: Epilogue
    ) -> None:
        """y = epilogue(W norm(x) + bias), as one operation."""
        x = source.x
        args = abi.LinearArgs(
            weight=packed.address,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            epilogue=epilogue,
            y=y.data_ptr(),
            y_stride=y.stride(0),
        )
        if source.norm is not None:
            args.norm_weight = source.norm.weight.data_ptr()
            args.eps = source.norm.eps
        if packed.bias is not None:
            args.bias = packed.bias.data_ptr()
        bytes_per_token = 4 * packed.padded_in + 64 + 4 * packed.padded_in // GROUP
        self.recorder.needs_scratch(args, self.recorder.capacity * bytes_per_token)
        self.recorder.add(args)

    def _record_product(
        self, packed: PackedMatrix, x: Tensor, norm: Norm | None, add: Tensor | None
    ) -> Tensor:
        if add is not None:
            self.record_linear(
                Source(x, norm),
                packed,
                add,
                Epilogue.ADD,
            )
            return add
        y = self.recorder.buffer(packed.out_size)
        self.record_linear(
            Source(x, norm),
            packed,
            y,
            Epilogue.STORE,
        )
        return y

    def _record_norm(self, x: Tensor, norm: Norm) -> Tensor:
        size = x.shape[1]
        out = self.recorder.buffer(size)
        args = abi.NormArgs(
            x=x.data_ptr(),
            weight=norm.weight.data_ptr(),
            out=out.data_ptr(),
            size=size,
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            eps=norm.eps,
        )
        self.recorder.add(args)
        return out


def _zeros(num_bytes: int) -> Tensor:
    """Zero bytes from a multiple of 64 on, which take no memory until they are written: torch.zeros
    would write them all, and the weights once more."""
    memory = torch.from_numpy(np.zeros(num_bytes + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + num_bytes]


def _in_panels(values: Tensor) -> Tensor:
    """[n] -> [ceil(n / PANEL), PANEL], filled up with zeros"""
    padding = -len(values) % abi.PANEL
    return torch.nn.functional.pad(values, (0, padding)).view(-1, abi.PANEL)

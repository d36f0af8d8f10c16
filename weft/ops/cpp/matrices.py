"""Matrices as the CPU kernels read them: panels of rows, in floats or in codes of a few bits.

`PackedMatrix` takes the values of a matrix part by part, packs them, and gives them back. This
module knows no program and no activation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from weft.ops.codes import CodeFormat, Codes, codes_of_int8
from weft.ops.cpp import abi
from weft.ops.cpp.abi import ContentType, ScaleType, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.weight_memory import WeightMemory
from weft.ops.quantize import INT4, INT8, INT8_BY_OUTPUT, quantize_as, widened

FLOAT_BYTES = {WeightFormat.F32: 4, WeightFormat.BF16: 2}
SCALE_TYPES = {
    torch.float32: ScaleType.F32,
    torch.float16: ScaleType.F16,
    torch.bfloat16: ScaleType.BF16,
}
SCALE_BYTES = {ScaleType.F32: 4, ScaleType.F16: 2, ScaleType.BF16: 2, ScaleType.COARSE: 1}
CONTENTS = {
    torch.float32: ContentType.FLOAT,
    torch.bfloat16: ContentType.BF16,
    torch.uint8: ContentType.CODES,
}
FORMAT_OF_BITS = {
    2: WeightFormat.I2,
    3: WeightFormat.I3,
    4: WeightFormat.I4,
    6: WeightFormat.I6,
    8: WeightFormat.I8,
}
CODES_OF = {WeightFormat.I8: INT8, WeightFormat.I4: INT4}  # formats into which floats are quantised


class KeptCodes(NamedTuple):
    """The announced format of the codes of a part (`keep_as`)."""

    format: CodeFormat
    order: bytes = b""  # of its inputs, int32; empty: the order of x


class PartSpan(NamedTuple):
    """Where the outputs of a part stand within a piece of a matrix."""

    part: int
    first_panel: int
    first_column: int  # within the first panel
    num_panels: int
    step: int  # between panels of this part: 2 if two parts alternate


class Panels:
    """Consecutive outputs of a weight, in one format: a `PackedWeight` of the kernels."""

    def __init__(
        self,
        source: WeightMemory,
        in_size: int,
        out_size: int,
        num_panels: int,
        format: WeightFormat,
        codes: CodeFormat | None,
        order: bytes = b"",
    ) -> None:
        self.codes = codes
        self._source = source
        self._memory: Tensor | None = None
        self.order: Tensor | None = None
        self.padded_in = _round_up(in_size, abi.IN_STEP)
        self.struct = abi.PackedWeight(
            format=format,
            in_size=in_size,
            out_size=out_size,
            padded_in=self.padded_in,
        )
        if format == WeightFormat.I16:
            num_groups = -(-self.padded_in // abi.SHORT_GROUP)
            panel_bytes = abi.PANEL * (4 * num_groups + 2 * self.padded_in)
        elif codes is None:
            panel_bytes = self.padded_in * abi.PANEL * FLOAT_BYTES[format]
        else:
            self._describe(codes)
            panel_bytes = self._head_bytes() + self.padded_in * abi.PANEL * codes.bits // 8
        self._num_bytes = num_panels * panel_bytes
        if order:
            self.order = torch.frombuffer(bytearray(order), dtype=torch.int32)
            self.struct.order = self.order.data_ptr()

    @property
    def memory(self) -> Tensor:
        """The memory of the panels. Allocated at first use, because `keep_as` may replace these
        panels before."""
        if self._memory is None:
            self._memory = self._source.zeros(self._num_bytes)
        return self._memory

    def adopt(self, memory: Tensor) -> None:
        """Keep the panels, with their content, in this memory from now on."""
        assert len(memory) == self._num_bytes
        self._memory = memory

    @property
    def address(self) -> int:
        """The address of the structure. Sets its pointer to the panels."""
        self.struct.panels = self.memory.data_ptr()
        return ctypes.addressof(self.struct)

    def _describe(self, codes: CodeFormat) -> None:
        struct = self.struct
        struct.group = codes.group or self.padded_in
        struct.scale_type = ScaleType.COARSE if codes.is_coarse else SCALE_TYPES[codes.scale_type]
        struct.has_mins = codes.has_mins
        struct.offset = codes.offset
        struct.unit = codes.unit
        if codes.table:
            # The kernels' table holds no negative numbers, so an offset shifts its values.
            struct.offset = -min(codes.table)
            struct.has_table = True
            for code, value in enumerate(codes.table):
                struct.table[code] = value + struct.offset

    def _head_bytes(self) -> int:
        """Bytes of the scales and mins of a panel, as drawn in `program.h`."""
        struct = self.struct
        num_kinds = 2 if struct.has_mins else 1
        num_bytes = -(-self.padded_in // struct.group) * SCALE_BYTES[struct.scale_type]
        if struct.scale_type == ScaleType.COARSE:
            num_bytes += 2 * -(-self.padded_in // abi.COARSE)
        return _round_up(num_bytes * num_kinds * abi.PANEL, 64)


class PackedMatrix:
    """A weight in the panels of `program.h`. The two parts of a gated weight alternate panel by
    panel.

    It consists of one or several `Panels`, called pieces, concatenated along the outputs. There are
    several if parts are stored as codes of different formats and kept so. The weights of all
    experts are one piece: the panels of each expert follow those of the expert before.
    """

    def __init__(
        self,
        library: Library,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        gated: bool,
        format: WeightFormat,
        keeps_codes: bool = False,
        num_experts: int = 1,
        *,
        takes_order: bool = False,
    ) -> None:
        self.sizes = sizes * num_experts
        self.out_size = sum(sizes)  # of one expert
        self._num_parts = len(sizes)  # of one expert
        self.num_experts = num_experts
        self.in_size = in_size
        self._library = library
        self._gated = gated
        self._format = format
        self._keeps_codes = keeps_codes
        self._takes_order = takes_order
        # What it was made as, which with `stored` determines the layout of its memory.
        self.made_as = (
            *(in_size, *sizes, num_experts),
            *(bias, gated, int(format), keeps_codes, takes_order),
        )
        self.stored: dict[int, KeptCodes] = {}  # by part, the announced codes
        self._has_content = False
        if gated:
            gate, up = sizes
            assert gate == up, "the parts of a gated weight have one size"
        # For each part: its panels, and the index of its first output within them.
        self._positions = self._positions_in(
            self._panels(self.out_size, format, CODES_OF.get(format))
        )
        num_outputs = num_experts * self._padded_out
        self.bias = torch.zeros(num_outputs) if bias else None

    @property
    def pieces(self) -> list[Panels]:
        """The pieces, in the order of the outputs."""
        return list(dict.fromkeys(panels for panels, _ in self._positions))

    def parts_of(self, panels: Panels) -> list[PartSpan]:
        """The parts of a piece."""
        found = []
        for part, (piece, first) in enumerate(self._positions):
            if piece is not panels:
                continue
            panel, column = divmod(first, abi.PANEL)
            num_panels = -(-(column + self.sizes[part]) // abi.PANEL)
            found.append(PartSpan(part, panel, column, num_panels, 2 if self._gated else 1))
        return found

    @property
    def padded_in(self) -> int:
        return _round_up(self.in_size, abi.IN_STEP)

    @property
    def tensors(self) -> Sequence[Tensor]:
        tensors = [panels.memory for panels in self.pieces]
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
        assert rows.shape[1] == self.in_size
        self._has_content = True
        panels, _ = self._positions[part]
        if scales is not None and rows.dtype == torch.int8 and panels.codes == INT8_BY_OUTPUT:
            self.put_codes(part, codes_of_int8(rows, scales), start)
            return
        rows = widened(rows, scales)
        if panels.order is not None:
            rows = rows[:, panels.order]
        if panels.codes not in (None, INT8, INT4):
            self._pack_codes(part, quantize_as(panels.codes, rows), start)
            return
        # The kernels pack rows of bfloat16 or float32.
        if rows.dtype != torch.bfloat16:
            rows = rows.float()
        rows = rows.contiguous()
        self._library.pack(self._pack_args(part, rows, start))

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        """Keep codes unchanged if `keeps_codes` is set or they have no more bits than the wanted
        format. Parts of a gated weight or of experts must all have the same codes."""
        if self._has_content or not self._takes(format):
            return
        kept = KeptCodes(format)
        if order is not None:
            if not self._takes_order:
                return
            kept = KeptCodes(format, order.numpy().tobytes())
        self.stored[part] = kept
        formats = set(self.stored.values())
        is_one = self._gated or self.num_experts > 1
        if len(self.stored) < len(self.sizes) or (is_one and len(formats) > 1):
            return
        self._positions = []
        if is_one:
            unsplit = self._panels(self.out_size, FORMAT_OF_BITS[format.bits], format, kept.order)
            self._positions = self._positions_in(unsplit)
            return
        for same, parts in groupby(range(len(self.sizes)), self.stored.__getitem__):
            sizes = [self.sizes[each] for each in parts]
            weight_format = FORMAT_OF_BITS[same.format.bits]
            panels = self._panels(sum(sizes), weight_format, same.format, same.order)
            for index in range(len(sizes)):
                self._positions.append((panels, sum(sizes[:index])))

    def _positions_in(self, unsplit: Panels) -> list[tuple[Panels, int]]:
        """The positions of all parts, if one piece holds them."""
        positions = []
        for part in range(len(self.sizes)):
            expert, of_expert = divmod(part, self._num_parts)
            first = sum(self.sizes[:of_expert])
            if self._gated:
                # Panels of the two parts alternate: panel 2 j is the gate's, 2 j + 1 the up's.
                first = of_expert * abi.PANEL
            positions.append((unsplit, expert * self._padded_out + first))
        return positions

    def _takes(self, format: CodeFormat) -> bool:
        asked = CODES_OF.get(self._format)
        if asked is None:
            return self._keeps_codes and _is_kept(format)
        return format.bits <= asked.bits and _is_kept(format)

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        panels, _ = self._positions[part]
        if panels.codes != codes.format or not _is_same(panels.order, codes.order):
            self.put(part, codes.dequantized(), start)
        else:
            self._pack_codes(part, codes, start)

    def _pack_codes(self, part: int, codes: Codes, start: int) -> None:
        """Pack codes that have the format and the order of the matrix."""
        self._has_content = True
        # Keeps the memory alive, because the arguments hold plain addresses.
        kept = [codes.values.contiguous()]
        args = self._pack_args(part, kept[0], start)
        for scales, name in ((codes.scales, "scales"), (codes.mins, "mins")):
            if scales is None:
                continue
            fine = (
                scales.fine if codes.format.is_coarse else scales.fine.to(codes.format.scale_type)
            )
            kept.append(fine.contiguous())
            setattr(args, name, kept[-1].data_ptr())
            if scales.coarse is not None:
                kept.append(scales.coarse.contiguous())
                setattr(args, "coarse_mins" if name == "mins" else "coarse", kept[-1].data_ptr())
        self._library.pack(args)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        num_rows = len(range(self.sizes[part])[start:stop])
        rows = torch.empty(num_rows, self.in_size)
        self._library.unpack(self._pack_args(part, rows, start))
        panels, _ = self._positions[part]
        if panels.order is None:
            return rows
        by_input = torch.empty_like(rows)
        by_input[:, panels.order] = rows
        return by_input

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
        expert, of_expert = divmod(part, self._num_parts)
        bias = bias.view(self.num_experts, -1)[expert]
        if self._gated:
            return bias.view(-1, 2, abi.PANEL)[:, of_expert]
        return bias[: self.out_size].split_with_sizes(self.sizes[: self._num_parts])[of_expert]

    @property
    def _padded_out(self) -> int:
        """Outputs of one expert, padded to whole panels."""
        return self._num_panels(self.out_size) * abi.PANEL

    def _num_panels(self, out_size: int) -> int:
        if self._gated:
            return 2 * -(-out_size // 2 // abi.PANEL)
        return -(-out_size // abi.PANEL)

    def _panels(
        self, out_size: int, format: WeightFormat, codes: CodeFormat | None, order: bytes = b""
    ) -> Panels:
        num_panels = self.num_experts * self._num_panels(out_size)
        return Panels(
            self._library.memory, self.in_size, out_size, num_panels, format, codes, order
        )

    def _pack_args(
        self,
        part: int,
        rows: Tensor,
        start: int,
    ) -> abi.PackArgs:
        panels, first = self._positions[part]
        first_row = first + start
        if self._gated:
            panel, within = divmod(start, abi.PANEL)
            first_row = first + 2 * panel * abi.PANEL + within
        return abi.PackArgs(
            weight=panels.address,
            matrix=rows.data_ptr(),
            content=CONTENTS[rows.dtype],
            num_rows=len(rows),
            first_row=first_row,
            interleave=2 if self._gated else 1,
        )


def _is_same(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)


def _is_kept(format: CodeFormat) -> bool:
    """Whether the kernels can read codes of this format."""
    has_group = format.group in (0, 16) or format.group % abi.PANEL == 0
    is_narrow = not format.is_coarse or 0 < format.group <= abi.COARSE
    return has_group and is_narrow and (format.bits in (3, 4) or not format.table)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _in_panels(values: Tensor) -> Tensor:
    """[n] -> [ceil(n / PANEL), PANEL], padded with zeros"""
    padding = -len(values) % abi.PANEL
    return torch.nn.functional.pad(values, (0, padding)).view(-1, abi.PANEL)

"""Adapters (LoRA) with the CPU kernels: `lora.h` adds them within the products of a program.

A program is recorded once for steps with and without adapters. It reads adapters from fixed
addresses: one structure per matrix, with one entry per adapter slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.arrays import IntArray
from weft.ops.cpp import abi
from weft.ops.cpp.matrices import PackedMatrix, Panels, PartSpan
from weft.ops.cpp.ops import RecordedParts
from weft.ops.cpp.weight_memory import WeightMemory, rounded_to_lines
from weft.ops.lora import (
    NO_RANKS,
    NO_TABLES,
    LoraPart,
    LoraParts,
    LoraTables,
    PutAdapter,
    Ranks,
    row_blocks,
)
from weft.ops.protocol import Matrix


class PackedPart(NamedTuple):
    """A and B in the layout of `program.h`."""

    a: Tensor
    b: Tensor
    rank: int
    scale: float
    gain: Tensor | None
    shift: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes that the part takes in an `AdapterMemory`."""
        tensors = (self.a, self.b, self.gain, self.shift)
        return sum(rounded_to_lines(one.nbytes) for one in tensors if one is not None)

    def kept(self, memory: AdapterMemory) -> PackedPart:
        """A contiguous copy in `memory`."""
        a = memory.copy(self.a)
        b = memory.copy(self.b)
        gain = None if self.gain is None else memory.copy(self.gain)
        shift = None if self.shift is None else memory.copy(self.shift)
        return self._replace(a=a, b=b, gain=gain, shift=shift)


class AdapterMemory:
    """Memory for one adapter at a time, in huge pages as for weights, because every step reads all
    of it. The system is slow to allocate huge pages, so this memory is reused."""

    def __init__(self, num_bytes: int) -> None:
        self._all = WeightMemory().zeros(num_bytes)
        self._num_used = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether an adapter of this size fits, after `clear`."""
        return len(self._all) >= num_bytes

    def clear(self) -> None:
        self._num_used = 0

    def copy(self, values: Tensor) -> Tensor:
        begin = self._num_used
        end = begin + values.nbytes
        self._num_used = begin + rounded_to_lines(values.nbytes)
        there = self._all[begin:end].view(values.dtype).view(values.shape)
        return there.copy_(values)


class PartsOfAdapters:
    """The weights of all adapters for the parts of a matrix, at a fixed address for the kernels."""

    def __init__(self, num_parts: int, num_adapters: int) -> None:
        self._num_parts = num_parts
        self._parts = (abi.PackedLoraPart * (num_adapters * num_parts))()
        self._kept: dict[
            int, list[PackedPart | None]
        ] = {}  # by adapter slot, the targets of `_parts`

    @property
    def address(self) -> int:
        return ctypes.addressof(self._parts)

    def put(self, adapter_slot: int, packed: list[PackedPart | None]) -> None:
        for index, part in enumerate(packed):
            entry = self._parts[adapter_slot * self._num_parts + index]
            if part is None:
                entry.rank = 0
                continue
            entry.a = part.a.data_ptr()
            entry.b = part.b.data_ptr()
            entry.gain = _address(part.gain)
            entry.shift = _address(part.shift)
            entry.scale = part.scale
            entry.rank = part.rank
        self._kept[adapter_slot] = packed

    def clear(self, adapter_slot: int) -> None:
        if adapter_slot in self._kept:
            self.put(adapter_slot, [None] * self._num_parts)
            del self._kept[adapter_slot]


class PieceAdapters(PartsOfAdapters):
    """The weights of all adapters for one piece of a matrix."""

    def __init__(self, spans: Sequence[PartSpan], num_adapters: int, *, max_rank: int) -> None:
        super().__init__(len(spans), num_adapters)
        self.spans = spans
        ranges = [abi.LoraRange(one.first_panel, one.num_panels, one.step) for one in spans]
        self._ranges = (abi.LoraRange * len(spans))(*ranges)
        self.struct = abi.Lora(
            num_parts=len(spans),
            ranges=ctypes.addressof(self._ranges),
            parts=self.address,
            max_rank=max_rank,
        )


class PackedRows(NamedTuple):
    """A, B and the gain for the rows of a table, as the kernels read them."""

    a: Tensor  # [rows of the table, rank]
    b: Tensor  # [rank, in], with the scale
    gain: Tensor | None  # [in]


class TableAdapters:
    """The weights of all adapters for the rows of one table."""

    def __init__(self, num_adapters: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows = (abi.LoraRows * num_adapters)()
        self._kept: dict[int, PackedRows] = {}  # by adapter slot, the targets of `_rows`
        self.struct = abi.LoraTable(
            is_bf16=dtype == torch.bfloat16, adapters=ctypes.addressof(self._rows)
        )

    def laid_out(self, part: LoraPart) -> PackedRows:
        """The part in the layout of the kernels, for `put`."""
        a = part.a.to(self._dtype).T.contiguous()
        b = (part.scale * part.b.float()).T.contiguous()
        return PackedRows(a, b, part.gain)

    def put(self, adapter_slot: int, packed: PackedRows) -> None:
        entry = self._rows[adapter_slot]
        entry.a = packed.a.data_ptr()
        entry.b = packed.b.data_ptr()
        entry.gain = _address(packed.gain)
        entry.rank = packed.a.shape[1]
        self._kept[adapter_slot] = packed

    def clear(self, adapter_slot: int) -> None:
        self._rows[adapter_slot].rank = 0
        self._kept.pop(adapter_slot, None)


class CppAdapters:
    """The `AdapterOps` of the CPU kernels."""

    has_gains = True

    def __init__(self, num_adapters: int, max_rank: int, dtype: torch.dtype) -> None:
        """Slots are 0 to num_adapters - 1, ranks of experts up to `max_rank`; dtype: float32 or
        bfloat16."""
        assert dtype in (torch.float32, torch.bfloat16)
        self.dtype = dtype
        self._num_adapters = num_adapters
        self._max_rank = _up(max_rank, abi.LORA_TILE)
        self._pieces: dict[Panels, PieceAdapters] = {}
        self._matrices: dict[Matrix, list[PieceAdapters]] = {}
        self._tables: dict[Panels, TableAdapters] = {}
        self._experts: dict[Panels, PartsOfAdapters] = {}  # of the matrices of all experts
        self._memory: dict[int, AdapterMemory] = {}  # by adapter slot, of its adapter
        self._spare: list[AdapterMemory] = []  # of removed adapters
        # Structures of steps; fused steps also have the fields of adapters for their heads.
        self._steps: list[ctypes.Structure] = []
        self._fused: list[abi.FusedStep] = []
        self._adapters: IntArray | None = None  # of the step's tokens
        # Kept alive, because the structures of steps point to them.
        self._of_tokens: TokenAdapters | None = None
        self._sampled: TokenAdapters | None = None
        self._of_head: TokenAdapters | None = None

    def of_steps(self, *steps: ctypes.Structure) -> None:
        """Let `begin` set the adapters in these structures, which the kernels read."""
        self._steps += steps
        self._fused += [step for step in steps if isinstance(step, abi.FusedStep)]

    def watch(self, matrices: Ranks, tables: Ranks = NO_RANKS) -> None:
        for matrix in tables:
            (panels,) = cast(PackedMatrix, matrix).pieces
            self._tables[panels] = TableAdapters(self._num_adapters, self.dtype)
        for matrix, rank in matrices.items():
            packed = cast(PackedMatrix, matrix)
            if matrix in self._matrices:
                continue
            if packed.num_experts > 1:
                (panels,) = packed.pieces
                of_all = PartsOfAdapters(len(packed.sizes), self._num_adapters)
                self._experts[panels] = of_all
                continue
            pieces = []
            for panels in packed.pieces:
                piece = PieceAdapters(
                    packed.parts_of(panels),
                    self._num_adapters,
                    max_rank=_up(rank, abi.LORA_TILE),
                )
                piece.struct.is_bf16 = self.dtype == torch.bfloat16
                self._pieces[panels] = piece
                pieces.append(piece)
            self._matrices[matrix] = pieces

    def of_panels(self, panels: Panels) -> abi.Lora | None:
        """The adapters of these panels; None if adapters cannot change them."""
        piece = self._pieces.get(panels)
        return None if piece is None else piece.struct

    def of_table(self, panels: Panels) -> abi.LoraTable | None:
        """The adapters of the rows of these panels; None if adapters cannot change them."""
        table = self._tables.get(panels)
        return None if table is None else table.struct

    def of_experts(self, panels: Panels) -> RecordedParts | None:
        """The adapters of the matrices of all experts; None if adapters cannot change them."""
        of_all = self._experts.get(panels)
        if of_all is None:
            return None
        is_bf16 = self.dtype == torch.bfloat16
        return RecordedParts(of_all.address, is_bf16, _up(self._max_rank, abi.SLAB))

    def scratch_bytes(self, lora: abi.Lora, num_tokens: int) -> int:
        """Bytes of scratch memory that a product needs for the values A x."""
        num_slabs = -(-lora.max_rank // abi.SLAB)
        return int(lora.num_parts * num_slabs * num_tokens * abi.SLAB * 4)

    def prepare(self, parts: LoraParts, tables: LoraTables = NO_TABLES) -> PutAdapter:
        packed: list[tuple[PartsOfAdapters, list[PackedPart | None]]] = []
        for matrix, of_matrix in parts.items():
            packed_matrix = cast(PackedMatrix, matrix)
            in_size = packed_matrix.padded_in
            if packed_matrix.num_experts > 1:
                (panels,) = packed_matrix.pieces
                of_experts = []
                for part, size in zip(of_matrix, packed_matrix.sizes, strict=True):
                    assert part is None or (part.gain is None and part.shift is None)
                    num_panels = -(-size // abi.PANEL)
                    there = PartSpan(0, 0, 0, num_panels, 1)
                    of_experts.append(self._packed(part, there, in_size))
                packed.append((self._experts[panels], of_experts))
                continue
            for piece in self._matrices[matrix]:
                of_piece = [self._packed(of_matrix[one.part], one, in_size) for one in piece.spans]
                packed.append((piece, of_piece))
        num_bytes = sum(part.num_bytes for _, parts in packed for part in parts if part is not None)
        memory = self._free_memory(num_bytes)
        kept = []
        for target, of_target in packed:
            of_slot = [None if part is None else part.kept(memory) for part in of_target]
            kept.append((target, of_slot))
        rows = []
        for matrix, part in tables.items():
            (panels,) = cast(PackedMatrix, matrix).pieces
            table = self._tables[panels]
            rows.append((table, table.laid_out(part)))

        def put(adapter_slot: int) -> None:
            self.clear(adapter_slot)
            for target, of_slot in kept:
                target.put(adapter_slot, of_slot)
            for table, of_rows in rows:
                table.put(adapter_slot, of_rows)
            self._memory[adapter_slot] = memory

        return put

    def _free_memory(self, num_bytes: int) -> AdapterMemory:
        """Memory that no step reads. `clear` may add to the spare memory meanwhile, on another
        thread."""
        while self._spare:
            memory = self._spare.pop()
            if memory.has_room(num_bytes):
                memory.clear()
                return memory
        return AdapterMemory(num_bytes)

    def clear(self, adapter_slot: int) -> None:
        if adapter_slot in self._memory:
            self._spare.append(self._memory.pop(adapter_slot))
        for piece in self._pieces.values():
            piece.clear(adapter_slot)
        for table in self._tables.values():
            table.clear(adapter_slot)
        for of_all in self._experts.values():
            of_all.clear(adapter_slot)

    def begin(self, adapters: IntArray | None, sampled: IntArray | None = None) -> None:
        if adapters is None and self._adapters is None:
            return
        self._adapters = adapters
        self._of_tokens = TokenAdapters.of(adapters)
        self._sampled = TokenAdapters.of(sampled)
        for step in self._steps:
            _set_adapters(step, self._of_tokens)
        for step in self._fused:
            _set_adapters(step, self._sampled, "head_")

    def tell(self, step: abi.StepArgs, places: Tensor | None) -> None:
        """Set the adapters of a step of a head: of the step's tokens at `places`; None: of all."""
        chosen = self._adapters
        if chosen is not None and places is not None:
            chosen = chosen[places.numpy()]
        self._of_head = TokenAdapters.of(chosen)
        _set_adapters(step, self._of_head)

    def _packed(self, part: LoraPart | None, span: PartSpan, in_size: int) -> PackedPart | None:
        if part is None:
            return None
        rank = _up(len(part.a), abi.LORA_TILE)
        return PackedPart(
            self._packed_a(part.a, rank, in_size),
            self._packed_b(part.b, rank, span),
            rank,
            part.scale,
            _in_panels(part.gain, span, 1.0),
            _in_panels(part.shift, span, 0.0),
        )

    def _packed_a(self, a: Tensor, rank: int, in_size: int) -> Tensor:
        num_columns = in_size - a.shape[1]
        padding = (0, num_columns, 0, rank - len(a))
        filled = _filled_up(a.to(self.dtype), padding)
        num_tiles = rank // abi.LORA_TILE
        if self.dtype == torch.float32:
            tiles = filled.view(num_tiles, abi.LORA_TILE, in_size)
            return tiles.transpose(1, 2)
        pairs = filled.view(torch.int32).view(num_tiles, abi.LORA_TILE, in_size // 2)
        return pairs.transpose(1, 2)

    def _packed_b(self, b: Tensor, rank: int, span: PartSpan) -> Tensor:
        below = span.num_panels * abi.PANEL - span.first_column - len(b)
        padding = (0, rank - b.shape[1], span.first_column, below)
        filled = _filled_up(b.to(self.dtype), padding)
        if self.dtype == torch.float32:
            panels = filled.view(span.num_panels, abi.PANEL, rank)
            return panels.transpose(1, 2)
        pairs = filled.view(torch.int32).view(span.num_panels, abi.PANEL, rank // 2)
        return pairs.transpose(1, 2)


class TokenAdapters(NamedTuple):
    """The adapter of each token of a step, as the kernels read it."""

    adapters: IntArray  # [T] the slot of each, or -1
    blocks: IntArray  # of `row_blocks`
    rows: IntArray

    @classmethod
    def of(cls, adapters: IntArray | None) -> TokenAdapters | None:
        """None if no token has an adapter."""
        if adapters is None or adapters.max(initial=-1) < 0:
            return None
        adapters = np.ascontiguousarray(adapters, np.int32)
        return cls(adapters, *row_blocks(adapters, abi.LORA_ROWS))


def _set_adapters(
    step: ctypes.Structure, of_tokens: TokenAdapters | None, prefix: str = ""
) -> None:
    """Set the four fields of a step that hold the adapters of its tokens. Their names begin with
    `prefix`."""
    adapters = None
    num_blocks = 0
    blocks = None
    rows = None
    if of_tokens is not None:
        adapters = of_tokens.adapters.ctypes.data
        num_blocks = len(of_tokens.blocks)
        blocks = of_tokens.blocks.ctypes.data
        rows = of_tokens.rows.ctypes.data
    setattr(step, f"{prefix}adapters", adapters)
    setattr(step, f"{prefix}num_lora_blocks", num_blocks)
    setattr(step, f"{prefix}lora_blocks", blocks)
    setattr(step, f"{prefix}lora_rows", rows)


def _in_panels(values: Tensor | None, span: PartSpan, of_others: float) -> Tensor | None:
    """A number per output of a part, in its panels, with `of_others` beside them."""
    if values is None:
        return None
    found = torch.full((span.num_panels * abi.PANEL,), of_others)
    found[span.first_column : span.first_column + len(values)] = values
    return found


def _address(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _filled_up(values: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
    """`values` padded with zeros, contiguous. `padding`: zeros before and after each row, and rows
    before and after all."""
    if any(padding):
        values = F.pad(values, padding)
    return values.contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step

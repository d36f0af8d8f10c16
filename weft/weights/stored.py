"""Weights in files, in the forms that weft reads: floats, eight bits with scales, blocks of GGUF.
Matrices that are packed in several tensors have their own package (`packed/`).

A stored weight announces its codes, so that a matrix can keep them, and loads its content into a
weight piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.models.layers.weight import Stack, Weight
from weft.ops.codes import Codes
from weft.ops.protocol import ROW_STEP
from weft.ops.quantize import INT8_BY_OUTPUT
from weft.weights.gguf.codes import FORMATS as BLOCK_FORMATS
from weft.weights.gguf.codes import BadScales, codes_of
from weft.weights.pieces import NOT_FINITE, PieceBuffer, is_finite
from weft.weights.safetensors import Content, TensorEntry
from weft.weights.scales import EIGHT_BITS, FLOATS, StoredScales

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class StoredWeight(Protocol):
    """A weight in files."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors, starting with the tensor that has most of the content."""
        ...

    def offer(self, weight: Weight) -> None:
        """Announce the format of its codes to the weight, if it has codes. Raises
        BadCheckpoint."""
        ...

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        """Load the content into the weight. Raises BadCheckpoint if it cannot be read any more."""
        ...

    def require_finite(self, buffer: PieceBuffer) -> None:
        """Read the whole content. Raises BadCheckpoint unless all values are finite."""
        ...


class StoredFloats(NamedTuple):
    """One tensor of floats."""

    content: Content
    entry: TensorEntry

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.entry.name,)

    def offer(self, weight: Weight) -> None:
        """Floats are no codes."""

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        for start, piece in self._pieces(buffer):
            weight.put(piece, start)

    def require_finite(self, buffer: PieceBuffer) -> None:
        for _ in self._pieces(buffer):
            pass

    def _pieces(self, buffer: PieceBuffer) -> Iterator[tuple[int, Tensor]]:
        """First row and content of each piece. Tensors other than matrices are one piece. Raises
        BadCheckpoint if values are not finite."""
        entry = self.entry
        dtype = FLOATS[entry.dtype]
        if len(entry.shape) != 2:
            values = buffer.read(self.content, entry.start, 1, entry.num_bytes).view(dtype)
            _check_values(self.content, entry, values)
            yield 0, _in_halves(values.view(entry.shape), entry.paired_rows)
            return
        row_bytes = entry.num_bytes // max(entry.shape[0], 1)
        for start, rows in buffer.rows(self.content, entry, row_bytes, _row_step(entry)):
            _check_values(self.content, entry, rows.view(dtype))
            yield start, _in_halves(rows.view(dtype), entry.paired_rows)


class StoredTransposed(NamedTuple):
    """A matrix of floats that is stored transposed, [in, out], in a tensor of many matrices. It is
    read as a whole, because the values of a row are spread over all of it."""

    content: Content
    entry: TensorEntry  # with the shape of the matrix

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.entry.name,)

    def offer(self, weight: Weight) -> None:
        """Floats are no codes."""

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        weight.put(self._read(buffer))

    def require_finite(self, buffer: PieceBuffer) -> None:
        self._read(buffer)

    def _read(self, buffer: PieceBuffer) -> Tensor:
        """Raises BadCheckpoint if values are not finite."""
        entry = self.entry
        values = buffer.read(self.content, entry.start, 1, entry.num_bytes)
        values = values.view(FLOATS[entry.dtype])
        _check_values(self.content, entry, values)
        return values.view(entry.shape[::-1]).t()


def part_of(entry: TensorEntry, weight: Weight, stack: Stack) -> TensorEntry:
    """Where a weight stands in a tensor that contains several weights."""
    num, num_rows, *_ = stack.shape
    row_bytes = entry.num_bytes // (num * num_rows)
    num_taken = num_rows
    if not stack.is_transposed:
        num_taken = weight.shape[0]
    return entry._replace(
        shape=weight.shape,
        start=entry.start + (stack.matrix * num_rows + stack.first) * row_bytes,
        num_bytes=num_taken * row_bytes,
    )


class StoredEightBits(NamedTuple):
    """A matrix of float8 or int8, and its scales."""

    content: Content
    entry: TensorEntry
    scales: StoredScales

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.entry.name, self.scales.entry.name)

    def offer(self, weight: Weight) -> None:
        is_kept = self.entry.dtype == "I8" and self.scales.is_by_row(self.entry)
        if is_kept and weight.keep_as is not None:
            weight.keep_as(INT8_BY_OUTPUT)

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        scales = self._scales()
        for start, piece in self._pieces(buffer):
            rows, by_row = self.scales.of(scales, start, piece)
            weight.put(rows, start, by_row)

    def require_finite(self, buffer: PieceBuffer) -> None:
        self._scales()
        for _ in self._pieces(buffer):
            pass

    def _scales(self) -> Tensor:
        """Raises BadCheckpoint if some are not finite."""
        scales = self.scales.read()
        _check_values(self.scales.content, self.scales.entry, scales)
        return scales

    def _pieces(self, buffer: PieceBuffer) -> Iterator[tuple[int, Tensor]]:
        """First row and content of each piece. Raises BadCheckpoint if values are not finite."""
        dtype = EIGHT_BITS[self.entry.dtype]
        widened_bytes = 4 * self.entry.shape[1]
        for start, rows in buffer.rows(self.content, self.entry, widened_bytes):
            _check_values(self.content, self.entry, rows.view(dtype))
            yield start, rows.view(dtype)


class StoredBlocks(NamedTuple):
    """A tensor of blocks of GGUF."""

    content: Content
    entry: TensorEntry

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.entry.name,)

    def offer(self, weight: Weight) -> None:
        if weight.keep_as is not None:
            weight.keep_as(BLOCK_FORMATS[self.entry.dtype])

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        for start, codes in self._pieces(buffer):
            put_codes(weight, codes, start)

    def require_finite(self, buffer: PieceBuffer) -> None:
        for _ in self._pieces(buffer):
            pass

    def _pieces(self, buffer: PieceBuffer) -> Iterator[tuple[int, Codes]]:
        """First row and codes of each piece. Raises BadCheckpoint if scales are not finite."""
        entry = self.entry
        if len(entry.shape) == 1:
            entry = entry._replace(shape=(1, *entry.shape))
        widened_bytes = 4 * entry.shape[1]
        for start, stored in buffer.rows(self.content, entry, widened_bytes, _row_step(entry)):
            rows = _in_halves(stored, entry.paired_rows)
            try:
                yield start, codes_of(entry.dtype, rows.numpy())
            except BadScales as exc:
                raise BadCheckpoint(
                    f"{self.content.label}: {entry.name} has scales that are not finite"
                ) from exc


def _check_values(content: Content, entry: TensorEntry, values: Tensor) -> None:
    """Raise BadCheckpoint unless values of a tensor are finite. A tensor without dimensions may be
    infinite: it is the limit of a product that has none."""
    if is_finite(values) or (not entry.shape and not values.isnan().any()):
        return
    raise BadCheckpoint(f"{content.label}: {entry.name} has {NOT_FINITE}")


def put_codes(weight: Weight, codes: Codes, start: int) -> None:
    """Load codes into a matrix; a vector gets them as floats."""
    if weight.put_codes is None:
        weight.put(codes.dequantized().view(weight.shape), start)
    else:
        weight.put_codes(codes, start)


def _row_step(entry: TensorEntry) -> int:
    """The number of rows of which pieces have multiples. If rows are reordered, pieces have whole
    heads."""
    if not entry.paired_rows:
        return ROW_STEP
    return math.lcm(ROW_STEP, entry.paired_rows)


def _in_halves(piece: Tensor, paired_rows: int) -> Tensor:
    """Reorder the rows of whole heads from consecutive pairs to halves: [heads, D / 2, 2] rows
    become [heads, 2, D / 2]."""
    if not paired_rows:
        return piece
    # In numpy, because torch would wake its threads, and wait for them longer than the copy takes.
    # On integers, because numpy has no bfloat16.
    bits = piece.view(BITS[piece.element_size()]).numpy()
    pairs = bits.reshape(-1, paired_rows // 2, 2, *piece.shape[1:])
    halves = pairs.swapaxes(1, 2).reshape(piece.shape)
    return torch.from_numpy(halves).view(piece.dtype)

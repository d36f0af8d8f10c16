"""Reads the bytes of tensors piece by piece, through one buffer, so that no tensor is in memory
twice.

Knows the offsets of bytes and the sizes of pieces, not the meaning of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.ops.protocol import ROW_STEP
from weft.weights.safetensors import Content, TensorEntry

PIECE_BYTES = 8 << 20
NOT_FINITE = "values that are not finite, or too large for bfloat16"
# The bits of the least value, without a sign, that has no finite value in bfloat16.
INFINITE = {
    torch.float64: (torch.int64, 0x47EF_EFFF_F000_0000),
    torch.float32: (torch.int32, 0x7F7F_8000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float8_e4m3fn: (torch.int8, 0x7F),  # has no infinity, and one NaN per sign
}


class PieceBuffer:
    """The buffer into which all pieces are read."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def rows(
        self, content: Content, entry: TensorEntry, widened_bytes: int, step: int = ROW_STEP
    ) -> Iterator[tuple[int, Tensor]]:
        """The pieces of a matrix: the index of the first row, and the bytes [n, bytes of a row] of
        each. A piece is valid until the caller asks for the next one.

        Pieces have multiples of `step` rows, except for the last. `widened_bytes`: bytes of a row
        after conversion.
        """
        num_rows = entry.shape[0]
        row_bytes = entry.num_bytes // max(num_rows, 1)
        most = piece_rows(widened_bytes)
        most = max(most // step, 1) * step
        for start in range(0, num_rows, most):
            num = min(most, num_rows - start)
            yield start, self.read(content, entry.start + start * row_bytes, num, row_bytes)

    def columns(
        self, content: Content, entry: TensorEntry, start: int, stop: int, item_bytes: int
    ) -> Tensor:
        """The bytes [rows, bytes] of the columns start..stop of a matrix, read row by row. Valid
        until the next call."""
        num_rows = entry.shape[0]
        row_bytes = entry.shape[1] * item_bytes
        begin = entry.start + start * item_bytes
        num_bytes = (stop - start) * item_bytes
        if num_bytes == row_bytes:
            return self.read(content, begin, num_rows, row_bytes)
        found = self._room(num_rows * num_bytes).view(num_rows, num_bytes)
        target = found.numpy()
        for row in range(num_rows):
            content.read_into(begin + row * row_bytes, target[row].data)
        return found

    def read(self, content: Content, start: int, num: int, row_bytes: int) -> Tensor:
        """[num, row_bytes] uint8 from the byte `start` on, valid until the next call."""
        found = self._room(num * row_bytes)
        content.read_into(start, found.numpy().data)
        return found.view(num, row_bytes)

    def _room(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes]


def read_all(content: Content, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """A small tensor, in its own memory."""
    values = torch.empty(entry.num_bytes, dtype=torch.uint8)
    content.read_into(entry.start, values.numpy().data)
    return values.view(dtype).view(entry.shape)


def piece_rows(row_bytes: int) -> int:
    """The number of rows of a piece, a multiple of ROW_STEP."""
    num_steps = PIECE_BYTES // max(row_bytes, 1) // ROW_STEP
    return max(num_steps, 1) * ROW_STEP


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite, also as bfloat16: the exponent of infinities and NaN has all
    bits set.

    So they are the largest integers: of all values without a sign bit, and, if the bit counts as a
    digit, of all. Numpy finds these forty times as fast as torch tests floats.
    """
    if not values.dtype.is_floating_point:
        return True
    if values.device.type != "cpu":
        return bool(torch.isfinite(values.bfloat16()).all())
    kind, infinite = INFINITE[values.dtype]
    bits = values.view(kind).numpy()
    digits = bits.view(bits.dtype.str.replace("i", "u"))
    sign = 1 << (8 * bits.itemsize - 1)
    return bool(bits.max(initial=0) < infinite and digits.max(initial=0) < sign + infinite)

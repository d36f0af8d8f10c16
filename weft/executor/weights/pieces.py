"""The bytes of tensors piece by piece, through one buffer: nothing is ever in memory twice.

Knows where bytes lie and how large pieces are, not what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.executor.weights.safetensors import Content, TensorEntry
from weft.ops.protocol import ROW_STEP

PIECE_BYTES = 8 << 20
EXPONENTS = {
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float8_e4m3fn: (torch.int8, 0x7F),  # has no infinity, and one NaN of either sign
}


class PieceBuffer:
    """The memory that all pieces go through."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def rows(
        self, content: Content, entry: TensorEntry, widened_bytes: int, step: int = ROW_STEP
    ) -> Iterator[tuple[int, Tensor]]:
        """First row and bytes [n, bytes of a row] of each piece of a matrix; a piece lives until
        the caller asks for the next.

        Pieces are whole multiples of `step` rows; a row takes `widened_bytes` in what is made
        of it.
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
        """The bytes [rows, bytes] of some columns of a matrix, which lie far apart in the file."""
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
        """[num, row_bytes] uint8, until the next call"""
        found = self._room(num * row_bytes)
        content.read_into(start, found.numpy().data)
        return found.view(num, row_bytes)

    def _room(self, num_bytes: int) -> Tensor:
        if num_bytes > len(self._bytes):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes]


def read_whole(content: Content, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """A small tensor, in a memory of its own."""
    values = torch.empty(entry.num_bytes, dtype=torch.uint8)
    content.read_into(entry.start, values.numpy().data)
    return values.view(dtype).view(entry.shape)


def piece_rows(row_bytes: int) -> int:
    """How many rows make a piece, a multiple of ROW_STEP."""
    num_steps = PIECE_BYTES // max(row_bytes, 1) // ROW_STEP
    return max(num_steps, 1) * ROW_STEP


def is_finite(values: Tensor) -> bool:
    """Whether no value is infinite or no number: then not all bits of its exponent are set.

    Numpy is ten times as fast at this as torch, which does it float by float.
    """
    if not values.dtype.is_floating_point:
        return True
    if values.device.type != "cpu":
        return bool(torch.isfinite(values).all())
    kind, exponent = EXPONENTS[values.dtype]
    bits = values.view(kind).numpy()
    return bool(((bits & exponent) != exponent).all())

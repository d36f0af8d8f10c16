"""Unpacks codes of four and eight bits from bytes or from words of 32 bits.

Words are little-endian. So if the first code is in the lowest bits, the bytes of a row of words are
the bytes of a row of codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The order in which AWQ packs eight columns: nibble i of a word holds column AWQ_ORDER[i].
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def codes_of_bytes(data: Tensor, bits: int) -> Tensor:
    """[n, bytes] uint8 -> [n, codes] uint8; the low bits are the first code."""
    if bits == 8:
        return data
    # A byte 0xHL becomes the two bytes 0x0L and 0x0H, in one operation.
    wide = data.to(torch.int16)
    wide |= wide << 4
    wide &= 0x0F0F
    return wide.view(torch.uint8)


def codes_by_output(words: Tensor, bits: int) -> Tensor:
    """[words, n] int32 -> [n, codes] uint8; each column of words holds the codes of an output."""
    by_output = words.t().contiguous()
    return codes_of_bytes(by_output.view(torch.uint8), bits)


def awq_columns(words: Tensor) -> Tensor:
    """[rows, words] int32 -> [8 * words, rows] uint8: the columns that AWQ packed."""
    by_column = words.t().contiguous()
    columns = torch.empty(len(by_column), 8, by_column.shape[1], dtype=torch.uint8)
    for index, column in enumerate(AWQ_ORDER):
        columns[:, column] = (by_column >> (4 * index)) & 0xF
    return columns.view(-1, by_column.shape[1])

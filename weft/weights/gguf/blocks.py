"""Unpacks the blocks of GGUF: values of a few bits, and scales of groups of 16 or 32 inputs.

This module only separates the bits of a file; `codes.py` gives them their meaning as weights. Knows
bytes and numpy arrays, neither files nor names of tensors. Source: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

NUM_K_GROUPS = 8  # groups of 32 in a block of 256
# Constants in the type of the bytes, so that numpy keeps that type.
FOUR = np.uint8(4)
SIX = np.uint8(6)
ONE_BIT = np.uint8(0x01)
TWO_BITS = np.uint8(0x03)
LOW_BITS = np.uint8(0x0F)
SIX_BITS = np.uint8(0x3F)
SIGN = np.uint8(0x80)


class BlockParts(NamedTuple):
    """The content of blocks, or of rows of blocks. The scale of a group is `fine`, or `fine` times
    `coarse`; likewise its minimum."""

    values: Bytes  # [blocks, size]
    fine: NDArray[Any]  # [blocks, groups] float16 or float32; int8 if there is a coarse factor
    coarse: NDArray[np.float16] | None = None  # [blocks, 1]
    fine_mins: NDArray[Any] | None = None
    coarse_mins: NDArray[np.float16] | None = None

    def by_row(self, num_rows: int) -> BlockParts:
        """The same content, by rows with equal numbers of blocks."""

        def joined(array: NDArray[Any]) -> NDArray[Any]:
            return np.ascontiguousarray(array).reshape(num_rows, -1)

        def joined_if_any(array: NDArray[Any] | None) -> NDArray[Any] | None:
            if array is None:
                return None
            return joined(array)

        return BlockParts(
            values=joined(self.values),
            fine=joined(self.fine),
            coarse=joined_if_any(self.coarse),
            fine_mins=joined_if_any(self.fine_mins),
            coarse_mins=joined_if_any(self.coarse_mins),
        )

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minimums are finite, and so all weights."""
        scales = (self.fine, self.coarse, self.fine_mins, self.coarse_mins)
        return all(one is None or np.isfinite(one).all() for one in scales)


class BlockFormat(NamedTuple):
    """The encoding of consecutive weights in consecutive bytes."""

    name: str
    size: int  # weights in a block
    num_bytes: int  # of a block
    read: Callable[[Bytes], BlockParts]  # [blocks, num_bytes] -> their content

    def parts(self, rows: Bytes) -> BlockParts:
        """Rows [rows, bytes] of whole blocks -> their content, by row."""
        return self.read(rows.reshape(-1, self.num_bytes)).by_row(len(rows))


def _q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_nibbles(blocks[:, 2:]),
        fine=_half(blocks, 0),
    )


def _q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_nibbles(blocks[:, 4:]),
        fine=_half(blocks, 0),
        fine_mins=_half(blocks, 2),
    )


def _q5_0(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_five_bits(blocks[:, 2:6], blocks[:, 6:]),
        fine=_half(blocks, 0),
    )


def _q5_1(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_five_bits(blocks[:, 4:8], blocks[:, 8:]),
        fine=_half(blocks, 0),
        fine_mins=_half(blocks, 2),
    )


def _q8_0(blocks: Bytes) -> BlockParts:
    # Signed values -128..127 become 0..255.
    return BlockParts(
        values=blocks[:, 2:] ^ SIGN,
        fine=_half(blocks, 0),
    )


def _q4_k(blocks: Bytes) -> BlockParts:
    values = _k_nibbles(blocks[:, 16:])
    return _with_k_scales(blocks, values)


def _q5_k(blocks: Bytes) -> BlockParts:
    low = _k_nibbles(blocks[:, 48:])
    # Bit g of byte i is the fifth bit of weight i of group g.
    shifts = np.arange(NUM_K_GROUPS, dtype=np.uint8)
    packed = blocks[:, None, 16:48]
    fifth = (packed >> shifts[:, None]) & ONE_BIT
    above = fifth << FOUR
    return _with_k_scales(blocks, low | above.reshape(low.shape))


def _q6_k(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # Each half of a block:   ql [64]: 32 x (low of 1st, of 3rd quarter), 32 x (2nd, 4th)
    #                         qh [32]: two bits each for the 1st, 2nd, 3rd and 4th quarter
    ql = blocks[:, :128].reshape(num, 2, 1, 64)
    low = np.concatenate([ql & LOW_BITS, ql >> FOUR], axis=2)
    qh = blocks[:, 128:192].reshape(num, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    high = (qh >> shifts[:, None]) & TWO_BITS
    above = high << FOUR
    return BlockParts(
        values=low.reshape(num, 256) | above.reshape(num, 256),
        fine=blocks[:, 192:208].view(np.int8),
        coarse=_half(blocks, 208),
    )


def _iq4_nl(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_nibbles(blocks[:, 2:]),
        fine=_half(blocks, 0),
    )


def _iq4_xs(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # Six bits per group, two from a 16-bit word and four from a nibble, minus 32.
    word = blocks[:, 2:4].copy().view(np.uint16)
    shifts = np.arange(0, 2 * NUM_K_GROUPS, 2, dtype=np.uint16)
    high = (word >> shifts) & np.uint16(3)
    above = high.astype(np.uint8) << FOUR
    pairs = blocks[:, 4:8]
    low = np.stack([pairs & LOW_BITS, pairs >> FOUR], axis=2)
    steps = low.reshape(num, NUM_K_GROUPS) | above
    values = _nibbles(blocks[:, 8:].reshape(-1, 16))
    return BlockParts(
        values=values.reshape(num, 256),
        fine=steps.view(np.int8) - np.int8(32),
        coarse=_half(blocks, 0),
    )


def _mxfp4(blocks: Bytes) -> BlockParts:
    # 2^(e - 128), half of the format's 2^(e - 127), because the table has twice its values.
    exponents = blocks[:, :1].astype(np.int32) - 128
    scales = np.ldexp(np.float32(1), exponents)
    return BlockParts(
        values=_nibbles(blocks[:, 1:]),
        fine=scales.astype(np.float32),
    )


def _half(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The float16 from byte `start` of each block on, [blocks, 1]."""
    pair = blocks[:, start : start + 2]
    return pair.copy().view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, bytes] -> [n, 2 * bytes]: the low four bits of all bytes, then the high ones."""
    low = packed & LOW_BITS
    high = packed >> FOUR
    return np.concatenate([low, high], axis=1)


def _five_bits(high: Bytes, packed: Bytes) -> Bytes:
    """Values of five bits: bit i of `high` [n, 4] above the four bits of weight i."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _nibbles(packed) | (fifth << FOUR)


def _k_nibbles(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 256]: each 32 bytes hold 32 weights in their low bits, then 32 in their high
    bits."""
    values = _nibbles(packed.reshape(-1, 32))
    return values.reshape(len(packed), 256)


def _with_k_scales(blocks: Bytes, values: Bytes) -> BlockParts:
    """`values`, with the scales and minimums [n, 8] of Q4_K and Q5_K: 6 bits each in 12 bytes.

    bytes 0..3:    2 bits of scale 4..7,    scale 0..3
    bytes 4..7:    2 bits of minimum 4..7,  minimum 0..3
    bytes 8..11:   minimum 4..7 (low 4),    scale 4..7 (low 4)
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    later_scales = (third & LOW_BITS) | (first >> SIX << FOUR)
    later_minimums = (third >> FOUR) | (second >> SIX << FOUR)
    scales = np.concatenate([first & SIX_BITS, later_scales], axis=1)
    minimums = np.concatenate([second & SIX_BITS, later_minimums], axis=1)
    return BlockParts(
        values=values,
        fine=scales.view(np.int8),
        coarse=_half(blocks, 0),
        # The format subtracts minimums.
        fine_mins=-minimums.view(np.int8),
        coarse_mins=_half(blocks, 2),
    )


BLOCKS = {
    one.name: one
    for one in (
        BlockFormat("Q4_0", 32, 18, _q4_0),
        BlockFormat("Q4_1", 32, 20, _q4_1),
        BlockFormat("Q5_0", 32, 22, _q5_0),
        BlockFormat("Q5_1", 32, 24, _q5_1),
        BlockFormat("Q8_0", 32, 34, _q8_0),
        BlockFormat("Q4_K", 256, 144, _q4_k),
        BlockFormat("Q5_K", 256, 176, _q5_k),
        BlockFormat("Q6_K", 256, 210, _q6_k),
        BlockFormat("IQ4_NL", 32, 18, _iq4_nl),
        BlockFormat("IQ4_XS", 256, 136, _iq4_xs),
        BlockFormat("MXFP4", 32, 17, _mxfp4),
    )
}

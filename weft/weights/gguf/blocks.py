"""Unpacks the blocks of GGUF: values of a few bits, and scales of groups of inputs.

This module only separates the bits of a file; `codes.py` gives them their meaning as weights. Knows
bytes and numpy arrays, neither files nor names of tensors. Source: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.weights.gguf.grids import grid

Bytes = NDArray[np.uint8]

NUM_K_GROUPS = 8  # groups of 32 in a block of 256
# Constants in the type of the bytes, so that numpy keeps that type.
TWO = np.uint8(2)
FOUR = np.uint8(4)
SIX = np.uint8(6)
ONE_BIT = np.uint8(0x01)
TWO_BITS = np.uint8(0x03)
LOW_BITS = np.uint8(0x0F)
SIX_BITS = np.uint8(0x3F)
SIGN = np.uint8(0x80)
QUARTER_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)


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
        """Rows [rows, bytes] of full blocks -> their content, by row."""
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
    high = (qh >> QUARTER_SHIFTS[:, None]) & TWO_BITS
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


def _q2_k(blocks: Bytes) -> BlockParts:
    # A byte for each 16 inputs: the scale in its low half, the minimum in its high half.
    both = blocks[:, :16]
    scales = both & LOW_BITS
    minimums = both >> FOUR
    return BlockParts(
        values=_quarters(blocks[:, 16:80]),
        fine=scales.view(np.int8),
        coarse=_half(blocks, 80),
        # The format subtracts minimums.
        fine_mins=-minimums.view(np.int8),
        coarse_mins=_half(blocks, 82),
    )


def _q3_k(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # Bit g of byte i is the third bit of weight i of group g.
    shifts = np.arange(NUM_K_GROUPS, dtype=np.uint8)
    third = (blocks[:, None, :32] >> shifts[:, None]) & ONE_BIT
    above = third << TWO
    # Six bits per group of 16, minus 32: four bits in bytes 0..7, the low halves first, then two
    # in each of four bytes.
    low = _nibbles(blocks[:, 96:104])
    packed = blocks[:, None, 104:108]
    high = (packed >> QUARTER_SHIFTS[:, None]) & TWO_BITS
    steps = low | (high.reshape(num, 16) << FOUR)
    return BlockParts(
        values=_quarters(blocks[:, 32:96]) | above.reshape(num, 256),
        fine=steps.view(np.int8) - np.int8(32),
        coarse=_half(blocks, 108),
    )


def _tq1_0(blocks: Bytes) -> BlockParts:
    """Ternary digits: as many as a byte holds, of weights that stand some apart."""
    digits = (
        _ternary(blocks[:, :32], 5),
        _ternary(blocks[:, 32:48], 5),
        _ternary(blocks[:, 48:52], 4),
    )
    return BlockParts(
        values=np.concatenate(digits, axis=1),
        fine=_half(blocks, 52),
    )


def _tq2_0(blocks: Bytes) -> BlockParts:
    return BlockParts(
        values=_quarters(blocks[:, :64]),
        fine=_half(blocks, 64),
    )


def _iq1_s(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # For each 32 inputs: three more bits of four indices, three of the scale, one of the shift.
    words = _words(blocks[:, 34:50], np.uint16)
    shifts = np.array([0, 3, 6, 9], dtype=np.uint16)
    above = (words[:, :, None] >> shifts) & np.uint16(7)
    indices = blocks[:, 2:34] | (above.reshape(num, 32) << np.uint16(8))
    steps = _odd((words >> np.uint16(12)) & np.uint16(7))
    is_below = (words >> np.uint16(15)).astype(bool)
    return BlockParts(
        values=_vectors("IQ1")[indices].view(np.uint8),
        # In eighths, as what is added to the three values.
        fine=steps * np.int8(8),
        coarse=_half(blocks, 0),
        fine_mins=np.where(is_below, -steps, steps),
        coarse_mins=_half(blocks, 0),
    )


def _iq1_m(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # For each 8 inputs: three more bits of an index, and one of the shift.
    nibbles = _pairs_of_nibbles(blocks[:, 32:48])
    above = (nibbles & np.uint8(7)).astype(np.uint16)
    indices = blocks[:, :32] | (above << np.uint16(8))
    is_below = (nibbles >> np.uint8(3)).astype(np.uint64)
    values = _vectors("IQ1")[indices] | (is_below * np.uint64(0x0404040404040404))
    # Four words: each has four scales of three bits, and four bits of the factor of all.
    words = _words(blocks[:, 48:56], np.uint16)
    shifts = np.array([0, 3, 6, 9], dtype=np.uint16)
    scales = (words[:, :, None] >> shifts) & np.uint16(7)
    parts = words >> np.uint16(12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    factor = np.bitwise_or.reduce(parts, axis=1, keepdims=True)
    return BlockParts(
        values=values.view(np.uint8),
        fine=_odd(scales.reshape(num, 16)),
        coarse=factor.view(np.float16),
    )


def _iq2_xxs(blocks: Bytes) -> BlockParts:
    # For each 32 inputs: four indices, then four times seven signs, and four bits of the scale.
    words = _words(blocks[:, 2:66], np.uint32)
    indices = np.ascontiguousarray(words[:, 0::2]).view(np.uint8)
    rest = words[:, 1::2]
    return BlockParts(
        values=_signed(_vectors("IQ2_XXS")[indices], _four_signs(rest), 2),
        fine=_odd(rest >> np.uint32(28)),
        coarse=_half(blocks, 0),
    )


def _iq2_xs(blocks: Bytes) -> BlockParts:
    words = _words(blocks[:, 2:66], np.uint16)  # nine bits of an index, and seven signs
    vectors = _vectors("IQ2_XS")[words & np.uint16(511)]
    return BlockParts(
        values=_signed(vectors, _SIGNS_OF_SEVEN[words >> np.uint16(9)], 2),
        fine=_odd(_pairs_of_nibbles(blocks[:, 66:74])),
        coarse=_half(blocks, 0),
    )


def _iq2_s(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    packed = blocks[:, 66:74, None]
    above = (packed >> QUARTER_SHIFTS) & TWO_BITS
    indices = blocks[:, 2:34] | (above.reshape(num, 32).astype(np.uint16) << np.uint16(8))
    return BlockParts(
        values=_signed(_vectors("IQ2_S")[indices], blocks[:, 34:66], 2),
        fine=_odd(_pairs_of_nibbles(blocks[:, 74:82])),
        coarse=_half(blocks, 0),
    )


def _iq3_xxs(blocks: Bytes) -> BlockParts:
    rest = _words(blocks[:, 66:98], np.uint32)
    vectors = _vectors("IQ3_XXS")[blocks[:, 2:66]]
    return BlockParts(
        values=_signed(vectors, _four_signs(rest), 3),
        fine=_odd(rest >> np.uint32(28)),
        coarse=_half(blocks, 0),
    )


def _iq3_s(blocks: Bytes) -> BlockParts:
    above = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    indices = blocks[:, 2:66] | (above.astype(np.uint16) << np.uint16(8))
    return BlockParts(
        values=_signed(_vectors("IQ3_S")[indices], blocks[:, 74:106], 3),
        fine=_odd(_pairs_of_nibbles(blocks[:, 106:110])),
        coarse=_half(blocks, 0),
    )


def _quarters(packed: Bytes) -> Bytes:
    """[n, 64] -> [n, 256]: each 32 bytes hold four times 32 weights, from their lowest two bits
    upwards."""
    halves = packed.reshape(-1, 2, 1, 32)
    values = (halves >> QUARTER_SHIFTS[:, None]) & TWO_BITS
    return values.reshape(len(packed), 256)


def _ternary(packed: Bytes, num_digits: int) -> Bytes:
    """[n, bytes] -> [n, num_digits * bytes]: the first digit of all bytes, then the second. A byte
    is a fraction of 256, which has them after its point."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:num_digits]
    # Multiplied within eight bits: what is before the point is dropped.
    fractions = packed[:, None, :] * powers[:, None]
    digits = (fractions.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return digits.astype(np.uint8).reshape(len(packed), -1)


def _words(packed: Bytes, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """[n, bytes] -> [n, words] of this type."""
    return np.ascontiguousarray(packed).view(dtype)


def _pairs_of_nibbles(packed: Bytes) -> Bytes:
    """[n, bytes] -> [n, 2 * bytes]: the low four bits of a byte, then its high ones."""
    return np.stack([packed & LOW_BITS, packed >> FOUR], axis=2).reshape(len(packed), -1)


def _odd(steps: NDArray[Any]) -> NDArray[np.int8]:
    """2 n + 1"""
    return (2 * steps + 1).astype(np.int8)


@cache
def _vectors(name: str) -> NDArray[Any]:
    """The vectors of a format of IQ as one integer each, their first element in its lowest
    byte."""
    values = grid(name)
    return values.view(f"<u{values.shape[1]}")[:, 0]


def _four_signs(words: NDArray[np.uint32]) -> Bytes:
    """[n, words] -> [n, 4 * words] the signs of 8 weights each; a word has four times seven of
    them, from its lowest bit on."""
    shifts = np.array([0, 7, 14, 21], dtype=np.uint32)
    sevens = (words[:, :, None] >> shifts) & np.uint32(0x7F)
    signs: Bytes = _SIGNS_OF_SEVEN[sevens.reshape(len(words), -1)]
    return signs


def _signed(vectors: NDArray[Any], signs: Bytes, shift: int) -> Bytes:
    """Vectors [n, ..], as integers, and signs [n, bytes] of 8 weights each -> codes [n, 8 * bytes]:
    the sign stands in bit `shift`, above the index of the magnitude."""
    codes = np.ascontiguousarray(vectors).view(np.uint64) | (_BYTES_OF_BITS[signs] << shift)
    return codes.view(np.uint8)


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


def _signs_of_seven() -> Bytes:
    """[128] seven signs, and an eighth with which the number of ones is even."""
    sevens = np.arange(128, dtype=np.uint8)
    ones = np.unpackbits(sevens[:, None], axis=1).sum(axis=1, dtype=np.uint8)
    signs: Bytes = sevens | ((ones & ONE_BIT) << np.uint8(7))
    return signs


_SIGNS_OF_SEVEN = _signs_of_seven()
# [256] bit i of a byte at the lowest place of byte i.
_BYTES_OF_BITS = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).view("<u8")[:, 0]

BLOCKS = {
    one.name: one
    for one in (
        BlockFormat("Q4_0", 32, 18, _q4_0),
        BlockFormat("Q4_1", 32, 20, _q4_1),
        BlockFormat("Q5_0", 32, 22, _q5_0),
        BlockFormat("Q5_1", 32, 24, _q5_1),
        BlockFormat("Q8_0", 32, 34, _q8_0),
        BlockFormat("Q2_K", 256, 84, _q2_k),
        BlockFormat("Q3_K", 256, 110, _q3_k),
        BlockFormat("Q4_K", 256, 144, _q4_k),
        BlockFormat("Q5_K", 256, 176, _q5_k),
        BlockFormat("Q6_K", 256, 210, _q6_k),
        BlockFormat("IQ1_S", 256, 50, _iq1_s),
        BlockFormat("IQ1_M", 256, 56, _iq1_m),
        BlockFormat("IQ2_XXS", 256, 66, _iq2_xxs),
        BlockFormat("IQ2_XS", 256, 74, _iq2_xs),
        BlockFormat("IQ2_S", 256, 82, _iq2_s),
        BlockFormat("IQ3_XXS", 256, 98, _iq3_xxs),
        BlockFormat("IQ3_S", 256, 110, _iq3_s),
        BlockFormat("IQ4_NL", 32, 18, _iq4_nl),
        BlockFormat("IQ4_XS", 256, 136, _iq4_xs),
        BlockFormat("MXFP4", 32, 17, _mxfp4),
        BlockFormat("TQ1_0", 256, 54, _tq1_0),
        BlockFormat("TQ2_0", 256, 66, _tq2_0),
    )
}

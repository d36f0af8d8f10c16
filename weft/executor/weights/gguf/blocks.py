"""The block formats of GGUF, as codes and scales: every weight is

    scale * code            or            scale * code + minimum

with one scale for each group of 16 or 32 inputs. Codes are small integers; formats with a
codebook have its integers as codes. All sums are in float32 and in the order of the formats'
definition, so that a widened weight has its bits.

Knows bytes and numpy arrays, neither files nor tensors' names. Source: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]
Floats = NDArray[np.float32]

NUM_K_GROUPS = 8  # groups of 32 in a block of 256
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
# Twice the values of e2m1, so that they are integers: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)


class CodedRows(NamedTuple):
    """Rows of a matrix as they are stored."""

    codes: Codes  # [rows, in]
    scales: Floats  # [rows, in / group]
    minimums: Floats | None  # [rows, in / group]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def is_finite(self) -> bool:
        """Whether all scales are numbers, and so all weights."""
        if self.minimums is not None and not np.isfinite(self.minimums).all():
            return False
        return bool(np.isfinite(self.scales).all())

    def widened(self) -> Floats:
        """The weights [rows, in]."""
        num_rows, num_groups = self.scales.shape
        values = self.codes.astype(np.float32).reshape(num_rows, num_groups, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            values *= self.scales[:, :, None]
            if self.minimums is not None:
                values += self.minimums[:, :, None]
        return values.reshape(num_rows, -1)


class BlockFormat(NamedTuple):
    """How a run of weights is stored in a run of bytes."""

    name: str
    size: int  # weights in a block
    num_bytes: int  # of a block
    read: Callable[[Bytes], CodedRows]  # [blocks, num_bytes] -> rows of one block

    def coded(self, rows: Bytes) -> CodedRows:
        """Rows of bytes [rows, bytes], each of whole blocks -> what they hold."""
        num_rows = len(rows)
        # Infinite scales are found by whoever reads a file; here they are numbers as others.
        with np.errstate(invalid="ignore", over="ignore"):
            found = self.read(rows.reshape(-1, self.num_bytes))
        minimums = found.minimums
        if minimums is not None:
            minimums = minimums.reshape(num_rows, -1)
        return CodedRows(
            codes=found.codes.reshape(num_rows, -1),
            scales=found.scales.reshape(num_rows, -1),
            minimums=minimums,
        )


def _q4_0(blocks: Bytes) -> CodedRows:
    return CodedRows(_nibbles(blocks[:, 2:]) - np.int8(8), _half(blocks, 0), None)


def _q4_1(blocks: Bytes) -> CodedRows:
    return CodedRows(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> CodedRows:
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    return CodedRows(codes - np.int8(16), _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> CodedRows:
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return CodedRows(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> CodedRows:
    return CodedRows(blocks[:, 2:].view(np.int8), _half(blocks, 0), None)


def _q4_k(blocks: Bytes) -> CodedRows:
    scales, minimums = _k_scales(blocks)
    return CodedRows(_k_nibbles(blocks[:, 16:]), scales, minimums)


def _q5_k(blocks: Bytes) -> CodedRows:
    scales, minimums = _k_scales(blocks)
    low = _k_nibbles(blocks[:, 48:])
    # Bit g of byte i is the fifth bit of weight i of group g.
    shifts = np.arange(NUM_K_GROUPS, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    codes = low | (high << np.uint8(4)).view(np.int8).reshape(low.shape)
    return CodedRows(codes, scales, minimums)


def _q6_k(blocks: Bytes) -> CodedRows:
    num = len(blocks)
    # Each half of a block:   ql [64]: 32 x (low of 1st, of 3rd quarter), 32 x (2nd, 4th)
    #                         qh [32]: two bits each for the 1st, 2nd, 3rd and 4th quarter
    ql = blocks[:, :128].reshape(num, 2, 1, 64)
    low = np.concatenate([ql & np.uint8(0x0F), ql >> np.uint8(4)], axis=2)
    qh = blocks[:, 128:192].reshape(num, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (qh >> shifts) & np.uint8(3)
    codes = low.reshape(num, 256) | (high << np.uint8(4)).reshape(num, 256)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return CodedRows(codes.view(np.int8) - np.int8(32), scales, None)


def _iq4_nl(blocks: Bytes) -> CodedRows:
    return CodedRows(IQ4_VALUES[_nibbles(blocks[:, 2:])], _half(blocks, 0), None)


def _iq4_xs(blocks: Bytes) -> CodedRows:
    num = len(blocks)
    high_bits = blocks[:, 2:4].copy().view(np.uint16)  # two for each group
    shifts = np.arange(0, 2 * NUM_K_GROUPS, 2, dtype=np.uint16)
    high = ((high_bits >> shifts) & np.uint16(3)).astype(np.uint8)
    pairs = blocks[:, 4:8]
    low = np.stack([pairs & np.uint8(0x0F), pairs >> np.uint8(4)], axis=2)
    steps = low.reshape(num, NUM_K_GROUPS) | (high << np.uint8(4))
    scales = _half(blocks, 0) * (steps.astype(np.float32) - np.float32(32))
    codes = IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(-1, 16))]
    return CodedRows(codes.reshape(num, 256), scales, None)


def _mxfp4(blocks: Bytes) -> CodedRows:
    # 2^(e - 128): half of the format's 2^(e - 127), for the codes are twice its values.
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    codes = E2M1_TWICE[_nibbles(blocks[:, 1:])]
    return CodedRows(codes, scales.astype(np.float32), None)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at a byte of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Codes:
    """[n, bytes] -> [n, 2 * bytes]: the low four bits of all bytes, then the high ones."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=1).view(np.int8)


def _five_bits(high: Bytes, packed: Bytes) -> Codes:
    """Bit i of `high` [n, 4] above the four bits of weight i."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _nibbles(packed) | (bits << np.uint8(4)).view(np.int8)


def _k_nibbles(packed: Bytes) -> Codes:
    """[n, 128] -> [n, 256]: 32 bytes hold 32 weights in their low, 32 in their high bits."""
    return _nibbles(packed.reshape(-1, 32)).reshape(len(packed), 256)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """The scales and minimums [n, 8] of Q4_K and Q5_K: 6 bits each in 12 bytes.

    bytes 0..3:    2 bits of scale 4..7,    scale 0..3
    bytes 4..7:    2 bits of minimum 4..7,  minimum 0..3
    bytes 8..11:   minimum 4..7 (low 4),    scale 4..7 (low 4)
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    third = blocks[:, 12:16]
    high_of_scales = (first >> np.uint8(6)) << np.uint8(4)
    high_of_minimums = (second >> np.uint8(6)) << np.uint8(4)
    six_bits = np.uint8(63)
    scales = np.concatenate(
        [first & six_bits, (third & np.uint8(0x0F)) | high_of_scales], axis=1
    ).astype(np.float32)
    minimums = np.concatenate(
        [second & six_bits, (third >> np.uint8(4)) | high_of_minimums], axis=1
    ).astype(np.float32)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minimums)


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

"""The blocks of GGUF, taken apart: values of a few bits, and scales of groups of 16 or 32 inputs.

What a file holds is kept apart, bit by bit; `codes.py` says what weights it stands for. Knows bytes
and numpy arrays, neither files nor tensors' names. Source: ggml's block structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

NUM_K_GROUPS = 8  # groups of 32 in a block of 256


class BlockParts(NamedTuple):
    """What blocks, or rows of them, hold. One number for each group is `fine`, or `fine` times
    `coarse`."""

    values: Bytes  # [blocks, size]
    fine: NDArray[Any]  # [blocks, groups] float16 or float32; int8 where there is a coarse factor
    coarse: NDArray[np.float16] | None = None  # [blocks, 1]
    fine_mins: NDArray[Any] | None = None
    coarse_mins: NDArray[np.float16] | None = None

    def by_row(self, num_rows: int) -> BlockParts:
        """The same for rows of as many blocks each."""
        return BlockParts(
            values=_rows(self.values, num_rows),
            fine=_rows(self.fine, num_rows),
            coarse=None if self.coarse is None else _rows(self.coarse, num_rows),
            fine_mins=None if self.fine_mins is None else _rows(self.fine_mins, num_rows),
            coarse_mins=None if self.coarse_mins is None else _rows(self.coarse_mins, num_rows),
        )

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minimums are numbers, and so all weights."""
        scales = (self.fine, self.coarse, self.fine_mins, self.coarse_mins)
        return all(one is None or np.isfinite(one).all() for one in scales)


class BlockFormat(NamedTuple):
    """How a run of weights is stored in a run of bytes."""

    name: str
    size: int  # weights in a block
    num_bytes: int  # of a block
    read: Callable[[Bytes], BlockParts]  # [blocks, num_bytes] -> what they hold

    def parts(self, rows: Bytes) -> BlockParts:
        """Rows of bytes [rows, bytes], each of whole blocks -> what they hold."""
        return self.read(rows.reshape(-1, self.num_bytes)).by_row(len(rows))


def _q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:]), _half(blocks, 0), fine_mins=_half(blocks, 2))


def _q5_0(blocks: Bytes) -> BlockParts:
    return BlockParts(_five_bits(blocks[:, 2:6], blocks[:, 6:]), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> BlockParts:
    values = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return BlockParts(values, _half(blocks, 0), fine_mins=_half(blocks, 2))


def _q8_0(blocks: Bytes) -> BlockParts:
    # Signed, -128..127, as 0..255.
    return BlockParts(blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0))


def _q4_k(blocks: Bytes) -> BlockParts:
    return _with_k_scales(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> BlockParts:
    low = _k_nibbles(blocks[:, 48:])
    # Bit g of byte i is the fifth bit of weight i of group g.
    shifts = np.arange(NUM_K_GROUPS, dtype=np.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    return _with_k_scales(blocks, low | (high << np.uint8(4)).reshape(low.shape))


def _q6_k(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    # Each half of a block:   ql [64]: 32 x (low of 1st, of 3rd quarter), 32 x (2nd, 4th)
    #                         qh [32]: two bits each for the 1st, 2nd, 3rd and 4th quarter
    ql = blocks[:, :128].reshape(num, 2, 1, 64)
    low = np.concatenate([ql & np.uint8(0x0F), ql >> np.uint8(4)], axis=2)
    qh = blocks[:, 128:192].reshape(num, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (qh >> shifts) & np.uint8(3)
    values = low.reshape(num, 256) | (high << np.uint8(4)).reshape(num, 256)
    return BlockParts(values, blocks[:, 192:208].view(np.int8), _half(blocks, 208))


def _iq4_nl(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> BlockParts:
    num = len(blocks)
    high_bits = blocks[:, 2:4].copy().view(np.uint16)  # two for each group
    shifts = np.arange(0, 2 * NUM_K_GROUPS, 2, dtype=np.uint16)
    high = ((high_bits >> shifts) & np.uint16(3)).astype(np.uint8)
    pairs = blocks[:, 4:8]
    low = np.stack([pairs & np.uint8(0x0F), pairs >> np.uint8(4)], axis=2)
    steps = low.reshape(num, NUM_K_GROUPS) | (high << np.uint8(4))
    values = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(num, 256)
    return BlockParts(values, steps.view(np.int8) - np.int8(32), _half(blocks, 0))


def _mxfp4(blocks: Bytes) -> BlockParts:
    # 2^(e - 128): half of the format's 2^(e - 127), for the table has twice its values.
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return BlockParts(_nibbles(blocks[:, 1:]), scales.astype(np.float32))


def _rows(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(num_rows, -1)


def _half(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The float16 at a byte of each block, [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, bytes] -> [n, 2 * bytes]: the low four bits of all bytes, then the high ones."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=1)


def _five_bits(high: Bytes, packed: Bytes) -> Bytes:
    """Bit i of `high` [n, 4] above the four bits of weight i."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    return _nibbles(packed) | (bits << np.uint8(4))


def _k_nibbles(packed: Bytes) -> Bytes:
    """[n, 128] -> [n, 256]: 32 bytes hold 32 weights in their low, 32 in their high bits."""
    return _nibbles(packed.reshape(-1, 32)).reshape(len(packed), 256)


def _with_k_scales(blocks: Bytes, values: Bytes) -> BlockParts:
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
        [first & six_bits, (third & np.uint8(0x0F)) | high_of_scales],
        axis=1,
    )
    minimums = np.concatenate(
        [second & six_bits, (third >> np.uint8(4)) | high_of_minimums],
        axis=1,
    )
    return BlockParts(
        values,
        fine=scales.view(np.int8),
        coarse=_half(blocks, 0),
        # Minimums are taken off.
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

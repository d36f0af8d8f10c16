"""Widened weights have the bits that the definition of their format gives."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from weft.weights.gguf.blocks import BLOCKS
from weft.weights.gguf.codes import BadScales, as_codes, codes_of


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_the_formats_own_package(kind: str) -> None:
    """Any bytes at all: scales that are infinite or no numbers, too. Only zeros may have another
    sign: what is taken off is an integer times a scale, and an integer 0 has none."""
    gguf = pytest.importorskip("gguf")
    form = BLOCKS[kind]
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 256, (96, form.num_bytes * 6), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    values = as_codes(kind, form.parts(rows)).dequantized().numpy()
    assert values.shape == (96, form.size * 6)
    are_nan = np.isnan(expected)
    assert (np.isnan(values) == are_nan).all()
    same_bits = values.view(np.uint32) == expected.view(np.uint32)
    both_zero = (values == 0) & (expected == 0)
    assert (same_bits | both_zero)[~are_nan].all()
    assert same_bits.mean() > 0.8
    # Most are numbers, so that something was compared.
    assert are_nan.mean() < 0.2


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_four_bits_stand_low_half_first() -> None:
    """w = d (q - 8)"""
    packed = bytes(i | (15 - i) << 4 for i in range(16))
    row = np.frombuffer(half(0.5) + packed, np.uint8)[None]
    expected = [0.5 * (q - 8) for q in (*range(16), *range(15, -1, -1))]
    assert codes_of("Q4_0", row).dequantized().tolist() == [expected]


def test_a_minimum_is_added() -> None:
    """w = d q + m"""
    row = np.frombuffer(half(0.25) + half(-1.5) + bytes([0x3A] * 16), np.uint8)[None]
    expected = [0.25 * 10 - 1.5] * 16 + [0.25 * 3 - 1.5] * 16
    assert codes_of("Q4_1", row).dequantized().tolist() == [expected]


def test_a_large_block_has_eight_scales_and_minimums() -> None:
    """w = d sc q - dmin m: with six bits for each of sc and m, the upper two of the last four stand
    above the first four."""
    scales = [1, 2, 3, 4, 17, 34, 51, 63]
    minimums = [5, 6, 7, 8, 20, 40, 60, 33]
    packed = [scales[i] | (scales[i + 4] >> 4) << 6 for i in range(4)]
    packed += [minimums[i] | (minimums[i + 4] >> 4) << 6 for i in range(4)]
    packed += [scales[i + 4] & 15 | (minimums[i + 4] & 15) << 4 for i in range(4)]
    row = half(2.0) + half(0.5) + bytes(packed) + bytes([0x21] * 128)
    values = codes_of("Q4_K", np.frombuffer(row, np.uint8)[None]).dequantized()
    expected = []
    for group in range(8):
        code = 1 if group % 2 == 0 else 2
        expected += [2.0 * scales[group] * code - 0.5 * minimums[group]] * 32
    assert values.tolist() == [expected]


def test_powers_of_two_and_e2m1() -> None:
    packed = bytes(i | i << 4 for i in range(16))
    row = np.frombuffer(bytes([128]) + packed, np.uint8)[None]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [2 * v for v in values] + [-2 * v for v in values]
    assert codes_of("MXFP4", row).dequantized().tolist() == [expected * 2]


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_seen(scale: float) -> None:
    good = half(0.5) + bytes(16)
    bad = half(scale) + bytes(16)
    with pytest.raises(BadScales):
        codes_of("Q4_0", np.frombuffer(good * 3 + bad, np.uint8)[None])
    assert codes_of("Q4_0", np.frombuffer(good * 4, np.uint8)[None]).values.shape == (1, 128)

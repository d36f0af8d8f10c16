"""What stored codes stand for, and how activations are rounded for them, against formulas in
numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.codes import FORMATS, expected, random_codes, rows_of
from weft.ops.codes import CodeFormat
from weft.ops.plain import PlainMatrix
from weft.ops.quantize import ROW_GROUP, round_rows


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("in_size", [32, 100, 300, 512])
def test_codes_stand_for_what_their_format_says(name: str, in_size: int) -> None:
    codes = random_codes(FORMATS[name], 70, in_size)
    np.testing.assert_array_equal(codes.dequantized().numpy(), expected(codes))


def test_rows_put_as_codes_are_the_weights_that_they_stand_for() -> None:
    matrix = PlainMatrix(100, (64, 70), False, torch.float32, torch.device("cpu"))
    codes = random_codes(CodeFormat(4, 32, offset=8), 70, 100)
    first = random_codes(CodeFormat(8, 0, offset=128), 64, 100)
    matrix.put_codes(0, first)
    for start, stop in ((0, 64), (64, 70)):
        matrix.put_codes(1, rows_of(codes, start, stop), start)
    assert torch.equal(matrix.get(0), first.dequantized())
    assert torch.equal(matrix.get(1), codes.dequantized())


def test_activations_are_rounded_by_a_quotient_that_is_rounded_once() -> None:
    x = torch.randn(4_000, 256, generator=torch.Generator().manual_seed(0))
    groups = x.numpy().reshape(-1, ROW_GROUP)
    peaks = np.abs(groups).max(axis=1, keepdims=True)
    steps = np.rint(groups * (np.float32(127) / peaks))
    rounded = steps * (peaks * np.float32(1 / 127))
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(round_rows(x).numpy(), rounded.reshape(x.shape))

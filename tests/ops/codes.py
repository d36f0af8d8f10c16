"""Random codes of every kind of format, and what they stand for, said again in numpy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.codes import COARSE, E2M1_TWICE, IQ4_NL, CodeFormat, Codes, Scales
from weft.ops.cpp.abi import WeightFormat

HALF = torch.float16
BRAIN = torch.bfloat16
# The formats that floats are packed into. Those of `KEPT` are only kept as they are stored.
KEPT = (WeightFormat.I2, WeightFormat.I3, WeightFormat.I6)
PACKED = tuple(each for each in WeightFormat if each not in KEPT)
TWO_BITS_SIGNED = (8, 25, 43, 0, -8, -25, -43, 0)
FORMATS = {
    "q4_0": CodeFormat(4, 32, offset=8, scale_type=HALF),
    "q4_1": CodeFormat(4, 32, has_mins=True, scale_type=HALF),
    "q4_k": CodeFormat(4, 32, has_mins=True, is_coarse=True),
    "q5_k": CodeFormat(6, 32, has_mins=True, is_coarse=True),
    "q6_k": CodeFormat(6, 16, offset=32, is_coarse=True),
    "q3_k": CodeFormat(3, 16, offset=4, is_coarse=True),
    "q2_k": CodeFormat(2, 16, has_mins=True, is_coarse=True),
    "iq3_s": CodeFormat(4, 32, table=tuple(range(-15, 16, 2)), is_coarse=True),
    "iq2_xxs": CodeFormat(3, 32, table=TWO_BITS_SIGNED, is_coarse=True, unit=0.125),
    "iq2_s": CodeFormat(3, 16, table=TWO_BITS_SIGNED, is_coarse=True, unit=0.125),
    "iq1_s": CodeFormat(2, 32, offset=1, has_mins=True, is_coarse=True, unit=0.125),
    "tq2_0": CodeFormat(2, 256, offset=1, scale_type=HALF),
    "q8_0": CodeFormat(8, 32, offset=128, scale_type=HALF),
    "iq4_nl": CodeFormat(4, 32, table=IQ4_NL, scale_type=HALF),
    "mxfp4": CodeFormat(4, 32, table=E2M1_TWICE),
    "nvfp4": CodeFormat(4, 16, table=E2M1_TWICE),
    "gptq, 128, asymmetric": CodeFormat(4, 128, has_mins=True, scale_type=HALF),
    "compressed-tensors, 64": CodeFormat(4, 64, offset=8, scale_type=BRAIN),
    "int8 by output": CodeFormat(8, 0, offset=128),
}


@lru_cache(maxsize=64)  # for each instruction set the same
def random_codes(format: CodeFormat, num_rows: int, in_size: int, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed + in_size)
    shape = (num_rows, in_size)
    values = torch.randint(2**format.bits, shape, generator=generator, dtype=torch.uint8)
    num_groups = -(-in_size // format.group) if format.group else 1
    scales = _scales(format, num_rows, num_groups, in_size, generator)
    mins = None
    if format.has_mins:
        mins = _scales(format, num_rows, num_groups, in_size, generator)
    return Codes(format, values, scales, mins)


@lru_cache(maxsize=16)
def codes_as_floats(format: CodeFormat, num_rows: int, in_size: int, seed: int = 0) -> Tensor:
    """What the random codes stand for, [num_rows, in_size]."""
    return random_codes(format, num_rows, in_size, seed).dequantized()


def _scales(
    format: CodeFormat,
    num_rows: int,
    num_groups: int,
    in_size: int,
    generator: torch.Generator,
) -> Scales:
    if format.is_coarse:
        fine = torch.randint(-63, 64, (num_rows, num_groups), generator=generator)
        shape = (num_rows, -(-in_size // COARSE))
        coarse = 1e-4 * torch.randn(shape, generator=generator)
        return Scales(fine.to(torch.int8), coarse.to(HALF))
    fine = 0.01 * torch.randn(num_rows, num_groups, generator=generator)
    return Scales(fine.to(format.scale_type))


def rows_of(codes: Codes, start: int, stop: int) -> Codes:
    rows = slice(start, stop)
    mins = None if codes.mins is None else codes.mins.rows(rows)
    return Codes(codes.format, codes.values[rows], codes.scales.rows(rows), mins)


def expected(codes: Codes) -> NDArray[np.float32]:
    """[n, in], input by input."""
    format = codes.format
    in_size = codes.values.shape[1]
    columns = []
    for k in range(in_size):
        values = codes.values[:, k].numpy().astype(np.int32)
        steps = np.array(format.table)[values] if format.table else values - format.offset
        weights = steps.astype(np.float32) * _number(format, codes.scales, k)
        if codes.mins is not None:
            weights = weights + _number(format, codes.mins, k)
        columns.append(weights)
    return np.stack(columns, axis=1)


def _number(format: CodeFormat, scales: Scales, k: int) -> NDArray[np.float32]:
    """Those of input k, [n]."""
    fine = _floats(scales.fine[:, k // format.group if format.group else 0])
    if scales.coarse is None:
        return fine
    return fine * (_floats(scales.coarse[:, k // COARSE]) * np.float32(format.unit))


def _floats(values: Tensor) -> NDArray[np.float32]:
    return values.float().numpy()

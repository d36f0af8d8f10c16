"""Floats of four bits (e2m1) with scales for groups of inputs: MXFP4 and NVFP4.

    mxfp4-pack-quantized   weight_packed U8 [out, in / 2], weight_scale U8 [out, in / 32]
    gpt-oss                X_blocks U8 [experts, out, in / 32, 16],
                           X_scales U8 [experts, out, in / 32]
    nvfp4-pack-quantized   weight_packed U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16],
                           weight_global_scale F32: divisor of scales
    NVFP4 of modelopt      weight U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16],
                           weight_scale_2 F32: factor of scales

The low four bits of a byte come first. MXFP4's scales are powers of two, 2^(byte - 127).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from weft.ops.codes import E2M1_TWICE, CodeFormat, Codes, Scales
from weft.ops.quantize import floats
from weft.weights.gguf.codes import BadScales
from weft.weights.packed.compressed import codes_of_rows
from weft.weights.packed.weight import Grouping, Misfit, PackedCodes, PackedTensors
from weft.weights.packed.words import codes_of_bytes
from weft.weights.pieces import is_finite, read_all
from weft.weights.scales import StoredTensor

MXFP4 = CodeFormat(bits=4, group=32, table=E2M1_TWICE)
NVFP4 = CodeFormat(bits=4, group=16, table=E2M1_TWICE)
# Half of the scale for each exponent of MXFP4; the last exponent encodes NaN.
HALF_SCALES = torch.tensor([*(2.0 ** (each - 128) for each in range(255)), torch.nan])


def mxfp4_codes(blocks: Tensor, exponents: Tensor) -> Codes:
    """Rows of a matrix in the layout of gpt-oss: blocks [n, in / 32, 16] and exponents
    [n, in / 32], both uint8 -> codes [n, in].

    Raises BadScales for a scale that is NaN.
    """
    scales = _powers_of_two(exponents)
    if not is_finite(scales):
        raise BadScales("MXFP4")
    return Codes(MXFP4, codes_of_bytes(blocks.flatten(1), 4), Scales(scales))


def mxfp4_weight(tensors: PackedTensors, shape: tuple[int, int]) -> PackedCodes:
    """Raises Misfit."""
    codes, scales = _tensors(tensors, "weight_packed", "U8", MXFP4.group, shape)
    return PackedCodes(
        shape=shape,
        tensors=tensors.found("weight_packed", "weight_scale", "weight_shape"),
        codes=partial(codes_of_rows, codes, 4),
        grouping=partial(_mxfp4_grouping, scales),
    )


def nvfp4_weight(tensors: PackedTensors, shape: tuple[int, int]) -> PackedCodes:
    """Raises Misfit."""
    codes, scales = _tensors(tensors, "weight_packed", "F8_E4M3", NVFP4.group, shape)
    factor = tensors.tensor("weight_global_scale", "F32", (), (1,))
    return PackedCodes(
        shape=shape,
        tensors=tensors.found("weight_packed", "weight_scale", "weight_global_scale"),
        codes=partial(codes_of_rows, codes, 4),
        grouping=partial(_nvfp4_grouping, scales, factor, divides=True),
    )


def modelopt_weight(tensors: PackedTensors, shape: tuple[int, int]) -> PackedCodes:
    """Raises Misfit."""
    codes, scales = _tensors(tensors, "weight", "F8_E4M3", NVFP4.group, shape)
    factor = tensors.tensor("weight_scale_2", "F32", (), (1,))
    return PackedCodes(
        shape=shape,
        tensors=tensors.found("weight", "weight_scale", "weight_scale_2"),
        codes=partial(codes_of_rows, codes, 4),
        grouping=partial(_nvfp4_grouping, scales, factor, divides=False),
    )


def _tensors(
    tensors: PackedTensors, codes: str, scale_type: str, group: int, shape: tuple[int, int]
) -> tuple[StoredTensor, StoredTensor]:
    """Codes and scales. Raises Misfit."""
    out_size, in_size = shape
    if in_size % group:
        raise Misfit(f"{tensors.module} has {in_size} inputs, which are no groups of {group}")
    return (
        tensors.tensor(codes, "U8", (out_size, in_size // 2)),
        tensors.tensor("weight_scale", scale_type, (out_size, in_size // group)),
    )


def _mxfp4_grouping(scales: StoredTensor) -> Grouping:
    return Grouping(MXFP4, _powers_of_two(read_all(*scales, torch.uint8)))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Half of the scales, because the table has twice the values of e2m1."""
    return HALF_SCALES[exponents.int()]


def _nvfp4_grouping(scales: StoredTensor, factor: StoredTensor, *, divides: bool) -> Grouping:
    fine = floats(read_all(*scales, torch.float8_e4m3fn))
    scale_of_all = read_all(*factor, torch.float32).flatten()
    values = fine / scale_of_all if divides else fine * scale_of_all
    return Grouping(NVFP4, values * 0.5)

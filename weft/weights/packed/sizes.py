"""Counts the weights of a checkpoint that are codes, and the bytes that they take in memory, from
the headers of its files alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from weft.config.quantized import Quantization
from weft.weights.safetensors import TensorEntry

# Endings of the names of codes, and of their scales and zero points.
CODES = ("_blocks", ".qweight", ".weight_packed", ".weight")
SCALES = ("_scales", ".scales", ".weight_scale")
ZEROS = (".qzeros", ".weight_zero_point")
FLOAT_BYTES = 4
# Types in which scales are kept; other types become float32.
KEPT_SCALES = ("F16", "BF16", "F32")


class CodedSize(NamedTuple):
    num_weights: int
    num_wide: int  # of these, codes of more than four bits
    num_bytes: int


def coded_size(entries: Mapping[str, TensorEntry], quantization: Quantization) -> CodedSize:
    num_weights = 0
    num_wide = 0
    num_bytes = 0
    for name, entry in entries.items():
        ending = _ending(name, CODES)
        bits = _bits(ending, entry, quantization)
        if not bits:
            continue
        num = entry.num_bytes * 8 // bits
        num_weights += num
        if bits > 4:
            num_wide += num
        num_bytes += entry.num_bytes
        module = name.removesuffix(ending)
        has_zeros = not quantization.is_symmetric and any(
            module + each in entries for each in ZEROS
        )
        for each in SCALES:
            if module + each in entries:
                has_mins = has_zeros and not quantization.is_symmetric
                num_bytes += _scale_bytes(entries[module + each], has_mins)
    return CodedSize(num_weights, num_wide, num_bytes)


def _ending(name: str, endings: tuple[str, ...]) -> str:
    return next((ending for ending in endings if name.endswith(ending)), "")


def _bits(ending: str, entry: TensorEntry, quantization: Quantization) -> int:
    """The bits of a code; 0 if the tensor has no codes."""
    if ending == "_blocks":  # MXFP4 of gpt-oss
        return 4
    if ending in (".qweight", ".weight_packed"):
        return quantization.bits or 4
    if ending == ".weight" and entry.dtype == "I8":
        return 8
    return 0


def _scale_bytes(scales: TensorEntry, has_mins: bool) -> int:
    num = math.prod(scales.shape)
    if has_mins:  # scales and minimums, both in float32
        return 2 * num * FLOAT_BYTES
    if scales.dtype in KEPT_SCALES:
        return scales.num_bytes
    return num * FLOAT_BYTES

"""The layout `pack-quantized` of compressed-tensors: matrices that are stored output by output.

    weight_packed      I32 [out, in / 8]       eight inputs per word (four with 8 bits)
    weight_scale       [out, groups], or one per output [out, 1]
    weight_zero_point  I32 [out / 8, groups]   eight outputs per word; or I8 [out, groups]
    weight_shape       I64 [2]                 out and in, because words are padded
    weight_g_idx       I32 [in]                the group of each input

A weight is scale * (code - zero). Code and zero are signed; in words, 2^(bits - 1) is added to
both.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.config.quantized import Quantization
from weft.weights.packed.weight import (
    Grouping,
    Misfit,
    PackedCodes,
    PackedTensors,
    bits_of,
    group_of,
    grouping_of,
    num_words,
)
from weft.weights.packed.words import codes_by_output, codes_of_bytes
from weft.weights.pieces import PieceBuffer, read_all
from weft.weights.scales import FLOATS, StoredTensor

SHAPE_TYPES = {"I64": torch.int64, "I32": torch.int32}


def compressed_weight(
    tensors: PackedTensors, shape: tuple[int, int], config: Quantization
) -> PackedCodes:
    """Raises Misfit."""
    out_size, in_size = shape
    _require_shape(tensors, shape)
    words = tensors.any_type("weight_packed")[1]
    expected = {bits: (out_size, num_words(in_size, bits)) for bits in (4, 8)}
    bits = bits_of(words, expected, config)
    codes = tensors.tensor("weight_packed", "I32", expected[bits])
    scales = tensors.any_type("weight_scale")
    group = group_of(scales[1], _grid(scales[1].shape), shape, config)
    zeros = None
    if "weight_zero_point" in tensors or config.is_symmetric is False:
        num_groups = -(-in_size // (group or in_size))
        packed_zeros = (num_words(out_size, bits), num_groups)
        zeros = tensors.any_type("weight_zero_point", packed_zeros, (out_size, num_groups))
    index = None
    if "weight_g_idx" in tensors:
        index = tensors.tensor("weight_g_idx", "I32", (in_size,))
    layout = CompressedLayout(scales, zeros, index, bits, group, out_size)
    endings = ("packed", "scale", "zero_point", "shape", "g_idx")
    return PackedCodes(
        shape=shape,
        tensors=tensors.found(*(f"weight_{ending}" for ending in endings)),
        codes=partial(codes_of_rows, codes, bits),
        grouping=layout.grouping,
    )


def codes_of_rows(
    codes: StoredTensor, bits: int, start: int, stop: int, buffer: PieceBuffer
) -> Tensor:
    """The codes [n, in] of a tensor whose rows are outputs, packed from the low bits on."""
    content, entry = codes
    row_bytes = entry.num_bytes // entry.shape[0]
    packed = buffer.read(content, entry.start + start * row_bytes, stop - start, row_bytes)
    return codes_of_bytes(packed, bits)


class CompressedLayout:
    """Reads the scales and zero points of one matrix."""

    def __init__(
        self,
        scales: StoredTensor,
        zeros: StoredTensor | None,
        index: StoredTensor | None,
        bits: int,
        group: int,
        out_size: int,
    ) -> None:
        self._scales = scales
        self._zeros = zeros
        self._index = index
        self._bits = bits
        self._group = group
        self._out_size = out_size

    def grouping(self) -> Grouping:
        content, entry = self._scales
        stored = read_all(content, entry, FLOATS[entry.dtype])
        # A single scale for the whole matrix is repeated for each output.
        scales = stored.view(_grid(entry.shape)).expand(self._out_size, -1).contiguous()
        return grouping_of(self._bits, self._group, scales, self._zero_points(), self._index)

    def _zero_points(self) -> Tensor | None:
        """The zero points [out, groups], for codes that begin at 0."""
        if self._zeros is None:
            return None
        content, entry = self._zeros
        middle = 2 ** (self._bits - 1)
        if entry.dtype == "I32":
            words = read_all(content, entry, torch.int32)
            return codes_by_output(words, self._bits)[:, : self._out_size].t()
        signed = read_all(content, entry, torch.int8).int()
        if bool((signed < -middle).any()) or bool((signed >= middle).any()):
            raise BadCheckpoint(
                f"{content.label}: {entry.name} has zero points that are not in "
                f"{-middle} to {middle - 1}"
            )
        zeros: Tensor = signed + middle
        return zeros


def _require_shape(tensors: PackedTensors, shape: tuple[int, int]) -> None:
    """Raise Misfit if the tensor `weight_shape` has another shape."""
    if "weight_shape" not in tensors:
        return
    content, entry = tensors.any_type("weight_shape", (2,))
    if entry.dtype not in SHAPE_TYPES:
        raise Misfit(f"{entry.name} {entry.dtype} instead of {' or '.join(SHAPE_TYPES)}")
    stored = read_all(content, entry, SHAPE_TYPES[entry.dtype]).tolist()
    if stored != list(shape):
        raise Misfit(f"{entry.name} says {stored} instead of {list(shape)}")


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales as [outputs, groups]."""
    if len(shape) == 2:
        return shape
    return (1, 1) if shape in ((), (1,)) else (*shape, 1)

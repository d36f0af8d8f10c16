"""The layouts of GPTQ and AWQ: matrices that are stored with their inputs as rows.

    GPTQ   qweight  I32 [in / 8, out]       eight inputs of an output per word (four with 8 bits)
           qzeros   I32 [groups, out / 8]   zero points, the same along the outputs
           scales   F16 [groups, out]
           g_idx    I32 [in]                the group of each input
    AWQ    qweight  I32 [in, out / 8]       eight outputs of an input, in AWQ's own order
           qzeros   I32 [groups, out / 8]   the same
           scales   F16 [groups, out]

A weight is scale * (code - zero). The first version of GPTQ's format subtracts 1 from zero points
before it stores them. Some files of the second version say that they are of the first. So for
symmetric weights, zero is the middle of the codes, whatever is stored.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.config.quantized import Quantization
from weft.observe.log import EventLog
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
from weft.weights.packed.words import awq_columns, codes_by_output, codes_of_bytes
from weft.weights.pieces import PieceBuffer, read_all
from weft.weights.scales import FLOATS, StoredTensor

WORD_BYTES = 4

log = EventLog("engine")


def gptq_weight(
    tensors: PackedTensors, shape: tuple[int, int], config: Quantization
) -> PackedCodes:
    """Raises Misfit."""
    out_size, in_size = shape
    words = tensors.any_type("qweight")[1]
    expected = {bits: (num_words(in_size, bits), out_size) for bits in (4, 8)}
    bits = bits_of(words, expected, config)
    codes = tensors.tensor("qweight", "I32", expected[bits])
    scales, group = _scales(tensors, shape, config)
    zeros = None
    if "qzeros" in tensors or not config.is_symmetric:
        groups = scales[1].shape[0]
        zeros = tensors.tensor("qzeros", "I32", (groups, num_words(out_size, bits)))
    index = None
    if "g_idx" in tensors:
        index = tensors.tensor("g_idx", "I32", (in_size,))
    layout = GptqLayout(codes, scales, zeros, index, bits, group, config)
    return PackedCodes(
        shape=shape,
        tensors=tensors.found("qweight", "qzeros", "scales", "g_idx"),
        codes=layout.codes,
        grouping=layout.grouping,
    )


def awq_weight(tensors: PackedTensors, shape: tuple[int, int], config: Quantization) -> PackedCodes:
    """Raises Misfit."""
    out_size, in_size = shape
    if out_size % 8:
        raise Misfit(f"{tensors.module} has {out_size} outputs, which AWQ cannot pack")
    codes = tensors.tensor("qweight", "I32", (in_size, out_size // 8))
    scales, group = _scales(tensors, shape, config)
    zeros = tensors.tensor("qzeros", "I32", (scales[1].shape[0], out_size // 8))
    return PackedCodes(
        shape=shape,
        tensors=tensors.found("qweight", "qzeros", "scales"),
        codes=partial(_awq_codes, codes),
        grouping=partial(_awq_grouping, scales, zeros, group),
    )


class GptqLayout:
    """Reads the tensors of one matrix."""

    def __init__(
        self,
        codes: StoredTensor,
        scales: StoredTensor,
        zeros: StoredTensor | None,
        index: StoredTensor | None,
        bits: int,
        group: int,
        config: Quantization,
    ) -> None:
        self._codes = codes
        self._scales = scales
        self._zeros = zeros
        self._index = index
        self._bits = bits
        self._group = group
        self._config = config

    def codes(self, start: int, stop: int, buffer: PieceBuffer) -> Tensor:
        content, entry = self._codes
        words = buffer.columns(content, entry, start, stop, WORD_BYTES)
        return codes_by_output(words.view(torch.int32), self._bits)

    def grouping(self) -> Grouping:
        scales = _by_output(self._scales)
        return grouping_of(self._bits, self._group, scales, self._zero_points(), self._index)

    def _zero_points(self) -> Tensor | None:
        """The zero points [out, groups]; None: the middle of the codes."""
        if self._zeros is None:
            return None
        words = read_all(*self._zeros, torch.int32)
        stored = codes_of_bytes(words.view(torch.uint8), self._bits)
        stored = stored[:, : self._codes[1].shape[1]]
        is_one = bool((stored == stored[0, 0]).all())
        name = self._zeros[1].name
        if self._config.is_symmetric and is_one:
            return None
        if self._config.is_symmetric and not self._config.varies:
            raise BadCheckpoint(
                f"{name} has different zero points, but config.json says that they are symmetric"
            )
        middle = 2 ** (self._bits - 1)
        if is_one and self._config.zero_shift and int(stored[0, 0]) == middle:
            log.warning(
                f"all of {name} are {middle}, as in the format gptq_v2; they are read as "
                f"{middle + 1}, for config.json says gptq"
            )
        return stored.t().int() + self._config.zero_shift


def _awq_codes(codes: StoredTensor, start: int, stop: int, buffer: PieceBuffer) -> Tensor:
    content, entry = codes
    words = buffer.columns(content, entry, start // 8, stop // 8, WORD_BYTES)
    return awq_columns(words.view(torch.int32))


def _awq_grouping(scales: StoredTensor, zeros: StoredTensor, group: int) -> Grouping:
    by_output = _by_output(scales)
    zero_points = awq_columns(read_all(*zeros, torch.int32))
    return grouping_of(4, group, by_output, zero_points)


def _by_output(scales: StoredTensor) -> Tensor:
    """[groups, out] -> [out, groups]"""
    content, entry = scales
    return read_all(content, entry, FLOATS[entry.dtype]).t().contiguous()


def _scales(
    tensors: PackedTensors, shape: tuple[int, int], config: Quantization
) -> tuple[StoredTensor, int]:
    """The scales, and the number of inputs that share one; 0: all. Raises Misfit."""
    content, entry = tensors.any_type("scales")
    return (content, entry), group_of(entry, entry.shape[::-1], shape, config)

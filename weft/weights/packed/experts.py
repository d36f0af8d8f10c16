"""MXFP4 of gpt-oss: two tensors hold the blocks and exponents of all experts; a weight reads those
of one expert.

    X_blocks   U8 [experts, out, in / 32, 16]
    X_scales   U8 [experts, out, in / 32]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from weft.config.model import BadCheckpoint
from weft.models.layers.weight import Stack, Weight
from weft.ops.codes import Codes
from weft.weights.gguf.codes import BadScales
from weft.weights.packed.float4 import MXFP4, mxfp4_codes
from weft.weights.packed.weight import Misfit
from weft.weights.pieces import PieceBuffer, piece_rows, read_all
from weft.weights.safetensors import TensorEntry
from weft.weights.scales import StoredTensor
from weft.weights.stored import part_of, put_codes

BLOCK_BYTES = 16
BLOCKS = "_blocks"
SCALES = "_scales"


class ExpertBlocks(NamedTuple):
    """The blocks of one weight."""

    blocks: StoredTensor  # of this weight: [out, in / 32 * 16] bytes
    scales: StoredTensor  # [out, in / 32]

    @property
    def num_bytes(self) -> int:
        return self.blocks[1].num_bytes + self.scales[1].num_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.blocks[1].name, self.scales[1].name)

    def offer(self, weight: Weight) -> None:
        if weight.keep_as is not None:
            weight.keep_as(MXFP4)

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        for start, codes in self._pieces(buffer):
            put_codes(weight, codes, start)

    def require_finite(self, buffer: PieceBuffer) -> None:
        for _ in self._pieces(buffer):
            pass

    def _pieces(self, buffer: PieceBuffer) -> Iterator[tuple[int, Codes]]:
        """First row and codes of each piece. Raises BadCheckpoint if scales are not finite."""
        content, entry = self.blocks
        exponents = read_all(*self.scales, torch.uint8)
        num_rows, row_bytes = entry.shape
        step = piece_rows(8 * row_bytes)
        for start in range(0, num_rows, step):
            num = min(step, num_rows - start)
            rows = buffer.read(content, entry.start + start * row_bytes, num, row_bytes)
            blocks = rows.view(num, -1, BLOCK_BYTES)
            try:
                yield start, mxfp4_codes(blocks, exponents[start : start + num])
            except BadScales as exc:
                raise BadCheckpoint(
                    f"{content.label}: {self.scales[1].name} has scales that are not finite"
                ) from exc


def expert_blocks(
    base: str, weight: Weight, stack: Stack, stored: Mapping[str, StoredTensor]
) -> ExpertBlocks | None:
    """The part of a weight in the stack's tensors; None if they do not exist. Raises Misfit."""
    if base + BLOCKS not in stored:
        return None
    num_experts, num_rows, in_size = stack.shape
    if base + SCALES not in stored:
        raise Misfit(f"{base}{SCALES} is missing")
    num_blocks = -(-in_size // MXFP4.group)
    blocks = _checked(stored[base + BLOCKS], (num_experts, num_rows, num_blocks, BLOCK_BYTES))
    scales = _checked(stored[base + SCALES], (num_experts, num_rows, num_blocks))
    of_weight = []
    for content, entry in (blocks, scales):
        part = part_of(entry, weight, stack)
        of_weight.append((content, part._replace(shape=(num_rows, part.num_bytes // num_rows))))
    return ExpertBlocks(*of_weight)


def _checked(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    entry: TensorEntry = tensor[1]
    if entry.dtype != "U8" or entry.shape != shape:
        raise Misfit(f"{entry.name} {entry.dtype} {list(entry.shape)} instead of U8 {list(shape)}")
    return tensor

"""Weights in four bits in the layout of bitsandbytes. They are converted to floats as they are
read, because their blocks cross the ends of rows, and no kernel of weft computes with such codes.

    weight                                U8 [out in / 2, 1]: two indices into the map, the high
                                          bits first
    weight.quant_map                      F32 [16]: the values of the indices
    weight.absmax                         F32 [blocks], a scale per block of the whole matrix,
                                          or U8 [blocks], indices into another map:
    weight.nested_quant_map               F32 [256]
    weight.nested_absmax                  F32: a scale per block of scales
    weight.quant_state.bitsandbytes__nf4  U8: JSON with the shape, and the sizes of both blocks
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.models.layers.weight import Weight
from weft.weights.packed.weight import Misfit, PackedTensors
from weft.weights.pieces import PieceBuffer, is_finite, piece_rows, read_all
from weft.weights.scales import StoredTensor

KINDS = ("nf4", "fp4")
MAX_STATE_BYTES = 4_096


class BlockSizes(NamedTuple):
    """The sizes of blocks, from the description of a matrix."""

    size: int  # weights that share a scale
    nested_size: int  # scales that share a scale
    offset: float  # added to scales that are indices into a map


class WidenedMatrix(NamedTuple):
    """A matrix of bitsandbytes, as a `StoredWeight`."""

    shape: tuple[int, int]
    tensors: list[StoredTensor]
    found: PackedTensors
    sizes: BlockSizes

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for _, entry in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for _, entry in self.tensors)

    def offer(self, weight: Weight) -> None:
        """Does nothing: the content is loaded as floats."""

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        out_size, in_size = self.shape
        values = read_all(*self.found.tensor("weight.quant_map", "F32", (16,)), torch.float32)
        scales = self._scales()
        content, entry = self.tensors[0]
        step = piece_rows(4 * in_size)
        for start in range(0, out_size, step):
            stop = min(start + step, out_size)
            first = start * in_size
            num = (stop - start) * in_size
            packed = buffer.read(content, entry.start + first // 2, 1, num // 2).flatten()
            codes = torch.stack((packed >> 4, packed & 0xF), dim=1).flatten()
            blocks = torch.arange(first, first + num) // self.sizes.size
            rows = values[codes.int()] * scales[blocks]
            weight.put(rows.view(stop - start, in_size), start)

    def require_finite(self, buffer: PieceBuffer) -> None:
        self._scales()

    def _scales(self) -> Tensor:
        """The scales [blocks] float32. Raises BadCheckpoint."""
        content, entry = self.found.any_type("weight.absmax")
        if entry.dtype == "F32":
            scales = read_all(content, entry, torch.float32).flatten()
        else:
            scales = self._nested(read_all(content, entry, torch.uint8).flatten())
        if not is_finite(scales):
            raise BadCheckpoint(f"{content.label}: {entry.name} has scales that are not finite")
        return scales

    def _nested(self, codes: Tensor) -> Tensor:
        found = self.found
        values = read_all(*found.tensor("weight.nested_quant_map", "F32", (256,)), torch.float32)
        content, entry = found.any_type("weight.nested_absmax")
        scale_of_all = read_all(content, entry, torch.float32).flatten()
        blocks = torch.arange(len(codes)) // self.sizes.nested_size
        return values[codes.int()] * scale_of_all[blocks] + self.sizes.offset


def bitsandbytes_weight(tensors: PackedTensors, shape: tuple[int, int]) -> WidenedMatrix:
    """Raises Misfit."""
    out_size, in_size = shape
    num_weights = out_size * in_size
    half = -(-num_weights // 2)
    tensors.tensor("weight", "U8", (half, 1), (1, half), (half,))
    tensors.tensor("weight.quant_map", "F32", (16,))
    states = [f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS]
    state = next((ending for ending in states if ending in tensors), "")
    if not state or in_size % 2:
        raise Misfit(f"{tensors.module}.weight has no weight.quant_state of {' or '.join(KINDS)}")
    sizes = _block_sizes(tensors, state, shape)
    num_blocks = -(-num_weights // sizes.size)
    scales = tensors.any_type("weight.absmax", (num_blocks,))[1]
    endings = ["weight", "weight.quant_map", "weight.absmax", state]
    if scales.dtype == "U8":
        num_nested = -(-num_blocks // sizes.nested_size)
        tensors.tensor("weight.nested_absmax", "F32", (num_nested,))
        tensors.tensor("weight.nested_quant_map", "F32", (256,))
        endings += ["weight.nested_absmax", "weight.nested_quant_map"]
    elif scales.dtype != "F32":
        raise Misfit(f"{scales.name} {scales.dtype} instead of F32 or U8")
    return WidenedMatrix(shape, tensors.found(*endings), tensors, sizes)


def _block_sizes(tensors: PackedTensors, state: str, shape: tuple[int, int]) -> BlockSizes:
    """The sizes in the description of a matrix. Raises Misfit if the description is invalid or has
    another shape."""
    content, entry = tensors.any_type(state)
    try:
        if entry.num_bytes > MAX_STATE_BYTES:
            raise ValueError("too long")
        data = read_all(content, entry, torch.uint8).numpy().tobytes()
        described = json.loads(data)
        stored = list(described["shape"])
        sizes = BlockSizes(
            size=int(described["blocksize"]),
            nested_size=int(described.get("nested_blocksize", 256)),
            offset=float(described.get("nested_offset", 0)),
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        raise Misfit(f"{entry.name} is not valid JSON of the expected form") from exc
    if stored != list(shape):
        raise Misfit(f"{entry.name} says {str(stored)[:64]} instead of {list(shape)}")
    if sizes.size < 1 or sizes.nested_size < 1:
        raise Misfit(f"{entry.name} has blocks of {sizes.size} and {sizes.nested_size}")
    return sizes

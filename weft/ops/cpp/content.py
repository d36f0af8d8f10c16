"""The content of all weights of some `CppOps` as blocks of bytes, which come back unchanged.

    layout     which parts of which matrices keep the codes of a checkpoint, in which format
    tensors    then every tensor has its size: vectors, panels, biases

It knows no file, and nothing about how weights are loaded.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.codes import CodeFormat
from weft.ops.cpp.matrices import KeptCodes, PackedMatrix
from weft.ops.cpp.ops import CppOps
from weft.ops.plain import PlainMatrix


class WeightContent:
    """`ops` of the model, and those of its parts; all of their weights have been made."""

    def __init__(self, ops: Sequence[CppOps]) -> None:
        self._ops = ops

    def sizes(self) -> list[Any]:
        """The sizes and formats of all weights, as they were made, as JSON."""
        return [[*map(_sizes_of, one.matrices), *map(len, one.vectors)] for one in self._ops]

    def layout(self) -> list[Any]:
        """The codes that matrices keep, as JSON, after the weights have been loaded."""
        return [_kept_of(matrix) for matrix in self._packed()]

    def lay_out(self, layout: Sequence[Any]) -> None:
        """Give the matrices this layout. They are as they were made."""
        for matrix, kept in zip(self._packed(), layout, strict=True):
            codes = [_codes_from(each) for each in kept["codes"]]
            for part, index in kept["parts"]:
                format, order = codes[index]
                matrix.keep_as(part, format, order)

    def blocks(self) -> list[NDArray[np.uint8]]:
        """The bytes of all tensors, in their order, in the memory of the weights."""
        return [bytes_of(tensor) for one in self._ops for tensor in one.tensors]

    def adopt(self, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """Replace the content of all tensors, which have their layout. Panels and tables move to
        the memory of the blocks; the others are copied, because the model holds them."""
        remaining = iter(blocks)
        for one in self._ops:
            for vector in one.vectors:
                _fill(vector, next(remaining))
            for matrix in one.matrices:
                if isinstance(matrix, PackedMatrix):
                    for panels in matrix.pieces:
                        panels.adopt(torch.from_numpy(next(remaining)))
                    if matrix.bias is not None:
                        _fill(matrix.bias, next(remaining))
                else:
                    assert isinstance(matrix, PlainMatrix)
                    matrix.adopt(torch.from_numpy(next(remaining)))
                    if matrix.bias is not None:
                        _fill(matrix.bias, next(remaining))
        assert next(remaining, None) is None, "there are more blocks than tensors"

    def _packed(self) -> list[PackedMatrix]:
        matrices = (matrix for one in self._ops for matrix in one.matrices)
        return [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]


def _sizes_of(matrix: object) -> list[Any]:
    if isinstance(matrix, PackedMatrix):
        return [*matrix.made_as]
    assert type(matrix) is PlainMatrix, "another kind of matrix has other content"
    return [*matrix.weight.shape, str(matrix.weight.dtype), matrix.bias is not None]


def _kept_of(matrix: PackedMatrix) -> dict[str, Any]:
    """The announced codes of a matrix, each of them once."""
    codes = list(dict.fromkeys(matrix.stored.values()))
    parts = [[part, codes.index(kept)] for part, kept in matrix.stored.items()]
    return {"codes": [_json_of(kept) for kept in codes], "parts": parts}


def _json_of(kept: KeptCodes) -> list[Any]:
    scale_type = str(kept.format.scale_type).removeprefix("torch.")
    format = kept.format._replace(scale_type=scale_type)  # type: ignore[arg-type]
    return [list(format), base64.b64encode(kept.order).decode()]


def _codes_from(kept: Sequence[Any]) -> tuple[CodeFormat, Tensor | None]:
    fields, order = kept
    read = CodeFormat(*fields)
    format = read._replace(table=tuple(read.table), scale_type=getattr(torch, str(read.scale_type)))
    if not order:
        return format, None
    return format, torch.frombuffer(bytearray(base64.b64decode(order)), dtype=torch.int32)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """[bytes], in the memory of the tensor."""
    found: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _fill(tensor: Tensor, block: NDArray[np.uint8]) -> None:
    target = bytes_of(tensor)
    assert len(target) == len(block), "a block has the size of its tensor"
    target[:] = block

"""Reads the scales of a checkpoint: of weights that it stores in eight bits, and of a KV cache in
fp8.

X.weight         F8_E4M3 or I8 [out, in]
X.weight_scale   (or _scale_inv) of the whole matrix [], [1] or [1, 1], of outputs [out] or
                 [out, 1], or of blocks [out / 128, in / 128] or [out, in / 128], rounded up;
                 a weight is the stored value times its scale
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.config.quantized import BLOCK
from weft.ops.quantize import floats
from weft.weights.base import in_base
from weft.weights.contents import labelled, open_contents
from weft.weights.fetch import weight_files
from weft.weights.safetensors import Content, TensorEntry

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
EIGHT_BITS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
ENDINGS = ("_scale", "_scale_inv")

# Endings of other scales: of activations, which weft scales by their own values, and of KV, which
# `kv_scales` reads.
BESIDE = (
    ".input_scale",
    ".activation_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_zero_point",
    ".v_zero_point",
)
KEYS = (
    "self_attn.k_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.k_proj.output_scale",
    "self_attn.kv_scale",
)
VALUES = (
    "self_attn.v_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.v_proj.output_scale",
    "self_attn.kv_scale",
)

StoredTensor = tuple[Content, TensorEntry]


class StoredScales(NamedTuple):
    """The scales of one weight."""

    content: Content
    entry: TensorEntry
    num_rows: int  # rows that share a scale
    num_columns: int  # columns that share a scale

    def read(self) -> Tensor:
        """The scales [row blocks, column blocks] float32. Raises BadCheckpoint."""
        return _read(self.content, self.entry).view(*_grid(self.entry.shape))

    def is_by_row(self, entry: TensorEntry) -> bool:
        """Whether each row of the weight has a single scale."""
        return self.num_columns >= entry.shape[1]

    def of(self, scales: Tensor, start: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stored `rows` from row `start` on, and their scales [n]. If a row has more than one
        scale, returns the rows multiplied by their scales, and None. `scales`: the result of
        `read`."""
        index = torch.arange(start, start + len(rows)) // self.num_rows
        by_row = scales[index]
        if by_row.shape[1] == 1:
            return rows, by_row[:, 0]
        by_column = by_row.repeat_interleave(self.num_columns, dim=1)
        return floats(rows) * by_column[:, : rows.shape[1]], None


def scales_of(entry: TensorEntry, name: str, stored: Mapping[str, StoredTensor]) -> StoredScales:
    """The scales of the weight `name` in `stored`. Raises BadCheckpoint if they are missing or do
    not fit; the message gives the reason."""
    for ending in ENDINGS:
        if name + ending in stored:
            content, found = stored[name + ending]
            break
    else:
        raise BadCheckpoint(f"{entry.name} {entry.dtype} without scales")
    if found.dtype not in FLOATS:
        raise BadCheckpoint(f"{found.name} {found.dtype} instead of one of {', '.join(FLOATS)}")
    if len(entry.shape) == 2:
        grid = _grid(found.shape)
        num_rows = _num_sharing(entry.shape[0], grid[0])
        num_columns = _num_sharing(entry.shape[1], grid[1])
        if num_rows and num_columns:
            return StoredScales(content, found, num_rows, num_columns)
    raise BadCheckpoint(f"{found.name} {list(found.shape)} for {list(entry.shape)}")


def _num_sharing(size: int, num_scales: int) -> int:
    """The number of rows (or columns) that share a scale, of `size`: all, one, or a block; 0: none
    of these fits."""
    for step in (size, 1, BLOCK):
        if -(-size // step) == num_scales:
            return step
    return 0


def is_of_a_weight(name: str, weights: Container[str]) -> bool:
    """Whether `name` is the name of the scales of one of the weights."""
    return any(name.endswith(ending) and name.removesuffix(ending) in weights for ending in ENDINGS)


def kv_scales(folder: Path, num_layers: int) -> list[tuple[float, float]]:
    """The scales by which K and V of each layer are divided before they are stored in fp8; 1 if the
    checkpoint has none.

    Raises BadCheckpoint for a scale that is not a positive finite number.
    """
    with ExitStack() as stack:
        stored: dict[str, StoredTensor] = {}
        for file in open_contents(stack, labelled(weight_files(folder))):
            for name, entry in file.entries.items():
                stored[in_base(name)] = (file, entry)
        scales = []
        for layer in range(num_layers):
            k_scale = _kv_scale(stored, layer, KEYS)
            v_scale = _kv_scale(stored, layer, VALUES)
            scales.append((k_scale, v_scale))
        return scales


def _kv_scale(stored: Mapping[str, StoredTensor], layer: int, endings: Iterable[str]) -> float:
    for ending in endings:
        name = f"layers.{layer}.{ending}"
        if name in stored:
            content, entry = stored[name]
            return _single_scale(content, entry)
    return 1.0


def _single_scale(content: Content, entry: TensorEntry) -> float:
    values = torch.empty(0)
    if entry.dtype in FLOATS:
        values = _read(content, entry)
    if values.numel() != 1 or not 0 < float(values) < torch.inf:
        raise BadCheckpoint(
            f"{entry.name} {entry.dtype} {list(entry.shape)} is not a scale of a layer's KV"
        )
    return float(values)


def _read(content: Content, entry: TensorEntry) -> Tensor:
    """The tensor, flat, as float32."""
    values = torch.empty(entry.num_bytes, dtype=torch.uint8)
    content.read_into(entry.start, values.numpy().data)
    return values.view(FLOATS[entry.dtype]).float()


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales as [row blocks, column blocks]."""
    if len(shape) > 1:
        return shape
    return (*shape, 1) if shape else (1, 1)

"""Scales that a checkpoint holds beside what it stores in eight bits, and those for a KV cache in fp8.

X.weight         F8_E4M3 or I8 [out, in]
X.weight_scale   (or _scale_inv) of the whole matrix [], [1] or [1, 1], of outputs [out] or [out, 1], or of blocks
                 [out / 128, in / 128] or [out, in / 128], rounded up; a weight is what is stored times its scale
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.config.quantized import BLOCK
from weft.executor.weights.fetch import weight_files
from weft.executor.weights.safetensors import Content, FileContent, TensorEntry
from weft.ops.quantize import floats

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EIGHT_BITS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
ENDINGS = ("_scale", "_scale_inv")

# What is said of activations, which are quantised as they come here, and of KV, which `kv_scales` reads.
BESIDE = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale")
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


class Scales(NamedTuple):
    """Those of one weight."""

    content: Content
    entry: TensorEntry
    num_rows: int  # that share one
    num_columns: int

    def read(self) -> Tensor:
        """[num of row blocks, num of column blocks] float32. Raises BadCheckpoint."""
        return _read(self.content, self.entry).view(*_grid(self.entry.shape))

    def of(self, whole: Tensor, start: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Stored rows from row `start` on with their scales [n]; times them where there is more than one in a row.
        `whole` is what `read` gave."""
        by_row = whole[torch.arange(start, start + len(rows)) // self.num_rows]
        if by_row.shape[1] == 1:
            return rows, by_row[:, 0]
        return floats(rows) * by_row.repeat_interleave(self.num_columns, dim=1)[
            :, : rows.shape[1]
        ], None


def scales_of(entry: TensorEntry, places: Mapping[str, StoredTensor]) -> Scales:
    """The scales of a stored weight. Raises BadCheckpoint, saying what is wrong with them."""
    content, found = next(
        (places[entry.name + end] for end in ENDINGS if entry.name + end in places), (None, None)
    )
    if content is None or found is None:
        raise BadCheckpoint(f"{entry.name} {entry.dtype} without scales")
    if found.dtype not in FLOATS:
        raise BadCheckpoint(f"{found.name} {found.dtype} instead of one of {', '.join(FLOATS)}")
    shared = [
        next((step for step in (size, 1, BLOCK) if -(-size // step) == num), 0)
        for size, num in zip(entry.shape, _grid(found.shape), strict=False)
    ]
    if len(shared) != 2 or not all(shared):
        raise BadCheckpoint(f"{found.name} {list(found.shape)} for {list(entry.shape)}")
    return Scales(content, found, *shared)


def is_of_a_weight(name: str, has_weight: Iterable[str]) -> bool:
    """Whether these are the scales of one of the weights."""
    return any(name.endswith(end) and name.removesuffix(end) in has_weight for end in ENDINGS)


def kv_scales(folder: Path, num_layers: int) -> list[tuple[float, float]]:
    """What K and V of each layer are divided by before they are kept in fp8; 1 where the checkpoint says nothing.

    Raises BadCheckpoint for a scale that is none.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(FileContent(path)) for path in weight_files(folder)]
        places: dict[str, StoredTensor] = {
            name: (file, entry) for file in files for name, entry in file.entries.items()
        }
        return [
            (_kv_scale(places, layer, KEYS), _kv_scale(places, layer, VALUES))
            for layer in range(num_layers)
        ]


def _kv_scale(places: Mapping[str, StoredTensor], layer: int, endings: Iterable[str]) -> float:
    for name in (f"{base}layers.{layer}.{end}" for end in endings for base in ("model.", "")):
        if name in places:
            content, entry = places[name]
            values = _read(content, entry) if entry.dtype in FLOATS else torch.empty(0)
            if values.numel() != 1 or not 0 < float(values) < torch.inf:
                raise BadCheckpoint(
                    f"{name} {entry.dtype} {list(entry.shape)} is no scale of a layer's KV"
                )
            return float(values)
    return 1.0


def _read(content: Content, entry: TensorEntry) -> Tensor:
    """As float32."""
    values = torch.empty(entry.num_bytes, dtype=torch.uint8)
    content.read_into(entry.start, values.numpy().data)
    return values.view(FLOATS[entry.dtype]).float()


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Scales as blocks of rows and of columns."""
    return shape if len(shape) > 1 else (*shape, *(1, 1)[len(shape) :])

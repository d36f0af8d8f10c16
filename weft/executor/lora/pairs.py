"""The values of an adapter: A and B of each module, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import ModelConfig
from weft.executor.lora.kinds.kind import AdapterError, StoredPair
from weft.executor.lora.read import AdapterInfo, read_files
from weft.weights.pieces import is_finite, read_all
from weft.weights.safetensors import BytesContent, TensorEntry

# Inputs of a module may be as large as the largest float16. What they make of larger values would
# overflow in the middle of a step, also in float32.
LARGEST_INPUT = 2.0**16
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LoraPair(NamedTuple):
    """y += scale B (A x); without B, y = A x."""

    a: Tensor  # [rank, in]
    b: Tensor | None  # [out, rank]
    scale: float


class Adapter(NamedTuple):
    info: AdapterInfo
    pairs: Mapping[str, LoraPair]  # by the name of the module in the base model


def read_adapter(
    folder: Path | str,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    max_rank: int = 0,
) -> Adapter:
    """Read and check the adapter in a folder; its values become `dtype`. Raises AdapterError."""
    files = read_files(folder, model, max_rank=max_rank)
    pairs = {}
    read: dict[tuple[str, torch.dtype], Tensor] = {}
    for module, stored in files.pairs.items():
        read_as = torch.float32 if stored.is_float32 else dtype
        values = [_kept(read, files.content, entry, read_as) for entry in stored.entries]
        a, b = stored.pair(values)
        if b is None:
            _require_range(stored, module, _sums(a), dtype)
            pairs[module] = LoraPair(a, None, 1.0)
            continue
        a, b = a.to(dtype), b.to(dtype)
        inner = _sums(a) * abs(stored.scale)
        _require_range(stored, module, torch.cat([inner, b.float().abs() @ inner]), dtype)
        pairs[module] = LoraPair(a, b, stored.scale)
    return Adapter(files.info, pairs)


def _sums(rows: Tensor) -> Tensor:
    """The most that each row [in] makes of inputs from -1 to 1."""
    return rows.float().abs().sum(1)


def _require_range(stored: StoredPair, module: str, most: Tensor, dtype: torch.dtype) -> None:
    """Raise AdapterError if values of the module's products could leave the range of `dtype`.
    `most`: what they are for inputs from -1 to 1."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max / LARGEST_INPUT)
    largest = most.max().item()
    if not largest <= limit:
        raise AdapterError(
            f"the values of {module[:200]} are too large for {str(dtype).removeprefix('torch.')}: "
            f"with scale {stored.scale:.3g}, they make {largest:.3g} of inputs from -1 to 1; at "
            f"most {limit:.3g} can be computed"
        )


def _kept(
    read: dict[tuple[str, torch.dtype], Tensor],
    content: BytesContent,
    entry: TensorEntry,
    dtype: torch.dtype,
) -> Tensor:
    """Values that are read once, even if several modules are parts of them."""
    key = (entry.name, dtype)
    if key not in read:
        read[key] = _values(content, entry, dtype)
    return read[key]


def _values(content: BytesContent, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    values = read_all(content, entry, DTYPES[entry.dtype])
    if values.dtype == torch.float16:
        values = values.float()  # torch takes twice as long to convert one half type to the other
    values = values.to(dtype)
    if not is_finite(values):
        raise AdapterError(f"{entry.name[:200]} has values that are not finite")
    return values

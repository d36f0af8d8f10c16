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
    """y += scale B (A x), and what else changes the product, as `StoredPair` says."""

    a: Tensor  # [rank, in]; without B: the matrix that replaces that of the model, in float32
    b: Tensor | None  # [out, rank]
    scale: float
    ids: tuple[int, ...] = ()
    length: Tensor | None = None  # [out] float32, like the next two
    bias: Tensor | None = None
    shift: Tensor | None = None

    @property
    def depends_on_model(self) -> bool:
        """Whether what it adds depends on the weights of the model."""
        return self.b is None or self.length is not None or self.bias is not None


class Adapter(NamedTuple):
    info: AdapterInfo
    pairs: Mapping[str, LoraPair]  # by the name of the module in the base model


def read_adapter(
    folder: Path | str,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    max_rank: int = 0,
    full_modules: str = "",
) -> Adapter:
    """Read and check the adapter in a folder; its values become `dtype`. Raises AdapterError."""
    files = read_files(folder, model, max_rank=max_rank, full_modules=full_modules)
    pairs = {}
    read: dict[tuple[str, torch.dtype], Tensor] = {}
    for module, stored in files.pairs.items():
        read_as = torch.float32 if stored.is_float32 else dtype
        values = [_kept(read, files.content, entry, read_as) for entry in stored.entries]
        a, b = stored.pair(values)
        vectors = [
            None if entry is None else _kept(read, files.content, entry, torch.float32)
            for entry in (stored.length, stored.bias, stored.shift)
        ]
        if b is None:
            _require_range(stored, module, _sums(a), dtype)
            pairs[module] = LoraPair(a, None, 1.0, stored.ids, *vectors)
            continue
        a, b = a.to(dtype), b.to(dtype)
        inner = _sums(a) * abs(stored.scale)
        outer = b.float().abs() @ inner
        for one in vectors[1:]:
            if one is not None:
                outer = outer + one.abs()
        _require_range(stored, module, torch.cat([inner, outer]), dtype)
        pairs[module] = LoraPair(a, b, stored.scale, stored.ids, *vectors)
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

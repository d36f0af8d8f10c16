"""A kind of adapters: what a folder of this kind contains, and how its tensors become A and B of
each module. Imports no torch: `../pairs.py` reads the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weft.config.automaton import BadPattern
from weft.config.model import ModelError
from weft.config.projections import Projection
from weft.executor.lora.patterns import ModulePatterns
from weft.json_types import JsonMapping
from weft.weights.safetensors import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FLOATS = ("F32", "F16", "BF16")


class AdapterError(ModelError):
    """The adapter cannot be used; the message says why, without a path."""


class StoredPair(NamedTuple):
    """A and B of one module, as entries of the file, and what else changes its product."""

    entries: tuple[TensorEntry, ...]
    rank: int
    scale: float
    # From the values of the entries to A [rank, in] and B [out, rank]; or to one matrix, which
    # replaces that of the model (an embedding: [rows, size]; else [out, in]), and None.
    pair: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor | None]]
    is_float32: bool = False  # `pair` computes, so it needs the values in float32
    ids: tuple[int, ...] = ()  # the rows that the matrix replaces; (): all
    length: TensorEntry | None = None  # [out] of each row of W + scale B A, which is scaled to it
    bias: TensorEntry | None = None  # [out] replaces that of the model
    shift: TensorEntry | None = None  # [out] is added to B A x

    @property
    def all_entries(self) -> list[TensorEntry]:
        others = (self.length, self.bias, self.shift)
        return [*self.entries, *(entry for entry in others if entry is not None)]


class AdapterKind(Protocol):
    """The reader of one value of "peft_type"."""

    def __call__(
        self,
        config: JsonMapping,
        entries: Mapping[str, TensorEntry],
        known: Mapping[str, Projection],
        max_rank: int,
    ) -> dict[str, StoredPair]:
        """A and B of each module that an adapter changes, by the name of the module in the base
        model. `config`: its adapter_config.json; `entries`: its tensors; `known`: the modules that
        adapters can change in this model, by their names in checkpoints. Raises AdapterError for
        anything that needs another formula, and unless every tensor is used."""
        ...


# Checks


def check_rank(written: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise AdapterError(
            f"the rank of {short(written)} is {rank}; at most {max_rank} is allowed "
            "(--max-lora-rank)"
        )


def check_entry(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise AdapterError(f"{short(entry.name)} is {list(entry.shape)} instead of {list(shape)}")
    if entry.dtype not in FLOATS:
        raise AdapterError(
            f"{short(entry.name)} is {entry.dtype}; supported are {', '.join(FLOATS)}"
        )


def named_layers(config: JsonMapping) -> frozenset[int] | None:
    """The layers that the adapter claims to change; None: the settings name none."""
    value = config.get("layers_to_transform")
    if value is None:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers):
        raise AdapterError(f"layers_to_transform is {short(value)}; numbers of layers are expected")
    return frozenset(numbers)


def layer_of(module: str) -> int | None:
    for part in module.split("."):
        if part.isdecimal():
            return int(part)
    return None


def endings(modules: Mapping[str, Projection]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in modules}))


def short(value: object) -> str:
    """The value for a message: one line of limited length."""
    text = value if isinstance(value, str) else repr(value)
    return text.encode("unicode_escape").decode()[:200]


# Settings


class BySetting:
    """The values that a setting gives to modules, by patterns of their names."""

    def __init__(self, config: JsonMapping, key: str, otherwise: Any) -> None:
        self._key = key
        self._otherwise = otherwise
        value = config.get(key) or {}
        if not isinstance(value, dict):
            raise AdapterError(f"{key} is not an object")
        try:
            self._patterns = ModulePatterns(value)
        except BadPattern as exc:
            raise AdapterError(f"{key}: {short(str(exc))}") from exc

    def value(self, module: str) -> Any:
        try:
            return self._patterns.value(module, self._otherwise)
        except BadPattern as exc:
            raise AdapterError(f"{self._key}: {short(str(exc))}") from exc


class FactorScales:
    """Ranks and scales of modules, by patterns of their names."""

    def __init__(self, config: JsonMapping, alpha_key: str, *, has_root: bool = False) -> None:
        """`alpha_key`: the key of alpha. The scale is alpha / rank, or with `has_root`
        alpha / sqrt(rank)."""
        self._ranks = BySetting(config, "rank_pattern", config.get("r", 8))
        self._alphas = BySetting(config, "alpha_pattern", config.get(alpha_key, 8))
        self._alpha_key = alpha_key
        self._has_root = has_root

    def rank(self, module: str) -> int:
        value = self._ranks.value(module)
        if type(value) is not int or value < 1:
            raise AdapterError(
                f"the rank of {short(module)} is {short(value)}; a whole number above 0 is expected"
            )
        return value

    def scale(self, module: str, rank: int) -> float:
        alpha = self._alphas.value(module)
        if type(alpha) not in (int, float) or not abs(alpha) < 1e6:
            raise AdapterError(
                f"{self._alpha_key} of {short(module)} is {short(alpha)}; "
                "a number below 1,000,000 is expected"
            )
        return float(alpha / math.sqrt(rank) if self._has_root else alpha / rank)

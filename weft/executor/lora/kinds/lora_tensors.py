"""The tensors of a LoRA adapter, by module: the names that peft gives them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from weft.executor.lora.kinds.kind import PREFIX, TENSORS, AdapterError, short
from weft.weights.safetensors import TensorEntry


class TensorKind(StrEnum):
    """What a tensor is to its module, with how peft says it at first."""

    A = ".lora_A.weight"
    B = ".lora_B.weight"
    SHIFT = ".lora_B.bias"
    TABLE_A = ".lora_embedding_A"
    TABLE_B = ".lora_embedding_B"
    LENGTH = ".lora_magnitude_vector"
    TOKENS = ".token_adapter.trainable_tokens_delta"  # the new rows, in spite of the name
    FULL = ".weight"
    BIAS = ".bias"
    OWN = ".base_layer.weight"  # a copy of the weights of the model


# Of several that fit, the first one counts.
SUFFIXES = {
    ".lora_magnitude_vector.weight": TensorKind.LENGTH,
    ".base_layer.bias": TensorKind.BIAS,
    **{kind.value: kind for kind in sorted(TensorKind, key=len, reverse=True)},
}

Tensors = dict[TensorKind, TensorEntry]


def by_module(entries: Mapping[str, TensorEntry]) -> dict[str, Tensors]:
    """The tensors of each module, by its name in the file.

    Raises AdapterError for tensors with other names, and for two that say the same.
    """
    found: dict[str, Tensors] = {}
    for name, entry in entries.items():
        suffix = next((one for one in SUFFIXES if name.endswith(one)), "")
        if not suffix or not name.startswith(PREFIX):
            raise AdapterError(
                f"{TENSORS} has {short(name)}; only these tensors are supported: {PREFIX}<module> "
                f"with {', '.join(SUFFIXES)}"
            )
        module = name.removeprefix(PREFIX).removesuffix(suffix)
        tensors = found.setdefault(module, {})
        kind = SUFFIXES[suffix]
        if kind in tensors:
            raise AdapterError(f"{TENSORS} has {short(tensors[kind].name)} and {short(name)}")
        tensors[kind] = entry
    return found

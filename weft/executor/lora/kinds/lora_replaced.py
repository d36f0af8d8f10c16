"""What a LoRA adapter brings besides A and B: other matrices, rows of tokens, and biases.

modules_to_save           <module>.weight replaces the matrix, .bias its bias
trainable_token_indices   rows replace those of some tokens, in embedding and head
bias                      .bias of a linear replaces the one of the model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.config.projections import HEAD, LABELS, Projection
from weft.executor.lora.kinds.kind import AdapterError, StoredPair, check_entry, endings, short
from weft.executor.lora.kinds.lora_tensors import TensorKind, Tensors
from weft.json_types import JsonMapping
from weft.weights.safetensors import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

CLASSIFIERS = (LABELS, "classifier")  # peft's names of every classifier
TOKENS = "trainable_token_indices"


def require_saved(config: JsonMapping, modules: Mapping[str, Tensors]) -> None:
    """Raises AdapterError for modules that are saved with the adapter but not in the file.

    peft names each classifier by both of its names."""
    named = config.get("modules_to_save") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise AdapterError(f"modules_to_save is {short(named)}; names of modules are expected")
    if config.get(TOKENS) and not any(TensorKind.TOKENS in tensors for tensors in modules.values()):
        raise AdapterError(f"{TOKENS} is set, but the adapter has no rows of tokens")
    for name in named:
        here = (module for module, of in modules.items() if TensorKind.FULL in of)
        if name not in CLASSIFIERS and not any(_is_named(module, name) for module in here):
            raise AdapterError(
                f"modules_to_save names {short(name)}, but the adapter has no {short(name)}.weight"
            )


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def replaced_matrix(
    written: str,
    entry: TensorEntry,
    one: Projection | None,
    known: Mapping[str, Projection],
    max_rank: int,
) -> StoredPair:
    """The matrix that replaces that of a module. Raises AdapterError."""
    if one is None or one.stack is not None:
        matrices = {name: each for name, each in known.items() if each.stack is None}
        raise AdapterError(
            f"the adapter replaces {short(written)}; in this model it can replace "
            f"{endings(matrices)}"
        )
    check_entry(entry, one.stored_shape)
    rank = one.full_rank
    most = one.most_rank(max_rank)
    if rank > most:
        raise AdapterError(
            f"the adapter replaces {short(written)}, which takes a rank of {rank:,}; at most "
            f"{most:,} is allowed (--lora-full-modules, --max-lora-rank)"
        )
    # The difference from the model's matrix is small; it is rounded later.
    return StoredPair((entry,), rank, 1.0, _as_stored, is_float32=True)


def bias_alone(one: Projection) -> StoredPair:
    """A pair that adds nothing, for a module of which the adapter has a bias alone."""

    def zeros(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        import torch

        return torch.zeros(1, one.in_size), torch.zeros(one.out_size, 1)

    return StoredPair((), 1, 1.0, zeros)


def rows_of_tokens(
    config: JsonMapping,
    written: str,
    entry: TensorEntry,
    one: Projection,
    max_rank: int,
) -> StoredPair:
    """The rows of an embedding or a head that an adapter replaces.

    `entry` has them in the order of the setting. Raises AdapterError.
    """
    num_rows = one.in_size if one.is_table else one.out_size
    size = one.out_size if one.is_table else one.in_size
    ids = _ids(config, written, num_rows)
    check_entry(entry, (len(ids), size))
    most = one.most_rank(max_rank)
    if len(ids) > most:
        raise AdapterError(
            f"{TOKENS} has {len(ids):,} tokens of {short(written)}; at most {most:,} are allowed "
            "(--lora-full-modules, --max-lora-rank)"
        )
    return StoredPair((entry,), len(ids), 1.0, _as_stored, is_float32=True, ids=ids)


def _ids(config: JsonMapping, written: str, num_rows: int) -> tuple[int, ...]:
    """The tokens whose rows are replaced in a module.

    The setting is a list, for the embedding, or has a list for each module by its name.
    """
    value = config.get(TOKENS)
    if isinstance(value, dict):
        value = next((ids for name, ids in value.items() if _is_named(written, name)), None)
    elif written.endswith(HEAD):
        value = None  # a list means the embedding
    if not isinstance(value, list) or not value:
        raise AdapterError(f"{TOKENS} names no tokens of {short(written)}")
    for id in value:
        if type(id) is not int or not 0 <= id < num_rows:
            raise AdapterError(
                f"{TOKENS} of {short(written)} has {short(id)}; 0 to {num_rows - 1:,} are allowed"
            )
    if len(set(value)) < len(value):
        raise AdapterError(f"{TOKENS} of {short(written)} has a token twice")
    return tuple(value)


def _as_stored(values: Sequence[Tensor]) -> tuple[Tensor, None]:
    (matrix,) = values
    return matrix, None

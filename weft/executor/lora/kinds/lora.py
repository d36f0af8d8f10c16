"""LoRA, as the package peft saves it.

    base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight
    of an embedding .lora_embedding_A, .lora_embedding_B
    of the labels of a classifier .weight [labels, in], which replaces

A module of the model becomes y = W x + scale B (A x). The tensors of an adapter say which modules
it changes. Anything that needs another formula, or other weights of the model, is refused by its
name.

Source: LoRA, arXiv:2106.09685; the scale of use_rslora: arXiv:2312.03732.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weft.config.projections import HEAD, LABELS, ExpertSlice, Projection
from weft.executor.lora.kinds.kind import (
    PREFIX,
    TENSORS,
    AdapterError,
    FactorScales,
    StoredPair,
    check_entry,
    check_rank,
    endings,
    layer_of,
    named_layers,
    short,
)
from weft.json_types import JsonMapping
from weft.weights.base import in_base
from weft.weights.safetensors import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

SIDES = (".lora_A.weight", ".lora_B.weight")
TABLE_SIDES = (".lora_embedding_A", ".lora_embedding_B")
CLASSIFIERS = (LABELS, "classifier")  # peft's names of every classifier
FULL_WEIGHT = ".weight"  # of a matrix that was trained as a whole
# Of the embedding and the head, besides A and B: peft also writes the model's own weights.
BASE_LAYER = ".base_layer"
OWN_WEIGHTS = f"{BASE_LAYER}.weight"
# Of `init_lora_weights`: the other values change the weights of the model.
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Settings that change the formula, or train something besides A and B.
OTHER_METHODS = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias of B",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "embeddings of single tokens",
    "arrow_config": "routing between adapters",
}
# Settings that peft always writes, without a meaning after training.
HARMLESS = ("megatron_config", "loftq_config", "eva_config", "corda_config", "runtime_config")


def read_lora(
    config: JsonMapping,
    entries: Mapping[str, TensorEntry],
    known: Mapping[str, Projection],
    max_rank: int,
) -> dict[str, StoredPair]:
    """The `AdapterKind` of LoRA."""
    _require_lora(config)
    _require_known_whole(config, known)
    scales = FactorScales(config, "lora_alpha", has_root=bool(config.get("use_rslora", False)))
    layers = named_layers(config)
    sizes = {in_base(name): size for name, size in known.items()}
    found: dict[str, StoredPair] = {}
    full_weight = PREFIX + LABELS + FULL_WEIGHT
    stacks = _stacks(known)
    for written in _modules(entries, full_weight):
        module = in_base(written)
        if _without_layers(module) in stacks:
            parts = stacks[_without_layers(module)]
            found |= _stacked(written, entries, parts, sizes, scales, max_rank)
            continue
        if module not in sizes:
            raise AdapterError(
                f"the adapter changes {short(written)}, which adapters cannot do in this model; "
                f"they can in {endings(sizes)}"
            )
        if module in found:
            raise AdapterError(f"the adapter has {short(module)} twice")
        if layers is not None and layer_of(module) not in layers:
            raise AdapterError(
                f"the adapter changes {short(written)}, which is not in layers_to_transform"
            )
        sides = TABLE_SIDES if sizes[module].is_table else SIDES
        for side in sides:
            if PREFIX + written + side not in entries:
                raise AdapterError(f"the adapter has no {short(written)}{side}")
        a, b = (entries[PREFIX + written + side] for side in sides)
        rank = scales.rank(written)
        check_rank(written, rank, max_rank)
        check_entry(a, (rank, sizes[module].in_size))
        check_entry(b, (sizes[module].out_size, rank))
        found[module] = StoredPair((a, b), rank, scales.scale(written, rank), _both)
    if full_weight in entries:
        found |= _labels(entries[full_weight], sizes, found, max_rank)
    if not found:
        raise AdapterError("the adapter has no tensors")
    ends = [in_base(name) for name, one in known.items() if one.is_table or name == HEAD]
    _check_own_weights(entries, {name: sizes[name] for name in ends})
    if config.get("ensure_weight_tying") and any(name in found for name in ends):
        raise AdapterError(
            "ensure_weight_tying is set: one A and B for embedding and head is not supported"
        )
    return found


Stacks = dict[str, dict[tuple[int, int], dict[str, ExpertSlice]]]


def _stacks(known: Mapping[str, Projection]) -> Stacks:
    """The modules of single experts that are stacked in one tensor, by parent module and by inputs
    and outputs of an expert."""
    found: Stacks = {}
    for name, one in known.items():
        if one.stack is None:
            continue
        below = in_base(one.stack.name).rpartition(".")[0]
        sizes = (one.in_size, one.stack.num_rows)
        found.setdefault(below, {}).setdefault(sizes, {})[in_base(name)] = one.stack
    return found


def _without_layers(module: str) -> str:
    """The module without the wrappers that peft adds, one for each of its tensors."""
    while module.endswith(BASE_LAYER):
        module = module.removesuffix(BASE_LAYER)
    return module


def _stacked(
    written: str,
    entries: Mapping[str, TensorEntry],
    stacks: Mapping[tuple[int, int], Mapping[str, ExpertSlice]],
    sizes_of: Mapping[str, Projection],
    scales: FactorScales,
    max_rank: int,
) -> dict[str, StoredPair]:
    """The pairs of all experts whose A are in one tensor, [experts rank, in], and whose B are in
    another, [out, rank experts]. Raises AdapterError."""
    for side in SIDES:
        if PREFIX + written + side not in entries:
            raise AdapterError(f"the adapter has no {short(written)}{side}")
    a, b = (entries[PREFIX + written + side] for side in SIDES)
    sizes = (a.shape[-1], b.shape[0])
    if sizes not in stacks:
        raise AdapterError(
            f"{short(written)} has {sizes[0]} inputs and {sizes[1]} outputs; experts have "
            + " or ".join(f"{ins} and {outs}" for ins, outs in stacks)
        )
    parts = stacks[sizes]
    any_slice = next(iter(parts.values()))
    rank = scales.rank(any_slice.name)
    check_rank(written, rank, max_rank)
    check_entry(a, (rank * any_slice.num_experts, sizes[0]))
    check_entry(b, (sizes[1], rank * any_slice.num_experts))
    scale = scales.scale(any_slice.name, rank)
    found = {}
    for module, of_stack in parts.items():
        of_expert = partial(_of_expert, of_stack, sizes_of[module].out_size)
        found[module] = StoredPair((a, b), rank, scale, of_expert)
    return found


def _both(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    a, b = values
    return a, b


def _of_expert(
    of_stack: ExpertSlice, num_rows: int, values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """A and B of an expert, from those that are stacked for all."""
    a, b = values
    num = of_stack.num_experts
    a = a.view(num, -1, a.shape[1])[of_stack.expert]
    rows = slice(of_stack.first, of_stack.first + num_rows)
    return a, b.view(len(b), -1, num)[rows, :, of_stack.expert]


def _as_stored(values: Sequence[Tensor]) -> tuple[Tensor, None]:
    (matrix,) = values
    return matrix, None


def _check_own_weights(entries: Mapping[str, TensorEntry], ends: Mapping[str, Projection]) -> None:
    """Check that weights of the model in the file are those of the embedding or the head, with the
    right shape. They equal the model's and are not read. Raises AdapterError."""
    for name, entry in entries.items():
        if not name.endswith(OWN_WEIGHTS):
            continue
        module = in_base(name.removeprefix(PREFIX).removesuffix(OWN_WEIGHTS))
        if module not in ends:
            raise AdapterError(f"{TENSORS} has {short(name)}, which are weights of the model")
        one = ends[module]
        shape = (one.out_size, one.in_size)
        check_entry(entry, shape[::-1] if one.is_table else shape)


def _require_known_whole(config: JsonMapping, known: Mapping[str, Projection]) -> None:
    """Raises AdapterError for modules that were trained as a whole, except the labels of a
    classifier."""
    named = config.get("modules_to_save") or ()
    allowed = CLASSIFIERS if LABELS in known else ()
    if not isinstance(named, list | tuple) or any(name not in allowed for name in named):
        raise AdapterError(f"modules_to_save is {short(named)}: whole modules are not supported")


def _labels(
    entry: TensorEntry,
    sizes: Mapping[str, Projection],
    found: Mapping[str, StoredPair],
    max_rank: int,
) -> dict[str, StoredPair]:
    """The labels of a classifier, which were trained as a whole. Raises AdapterError."""
    if LABELS not in sizes:
        raise AdapterError(
            f"the adapter has the whole module {LABELS}, which this model does not have"
        )
    if LABELS in found:
        raise AdapterError(f"the adapter has {LABELS} twice")
    num_labels = sizes[LABELS].out_size
    check_entry(entry, (num_labels, sizes[LABELS].in_size))
    if num_labels > max_rank:
        raise AdapterError(
            f"the adapter has {LABELS} for {num_labels} labels; at most {max_rank} are allowed "
            "(--max-lora-rank)"
        )
    # The difference from the model's matrix is small; it is rounded later.
    return {LABELS: StoredPair((entry,), num_labels, 1.0, _as_stored, is_float32=True)}


def _modules(entries: Mapping[str, TensorEntry], full_weight: str) -> Iterator[str]:
    """The modules of the pairs of tensors, with their names in the file. `full_weight`: the
    only allowed tensor that is not part of a pair. Raises AdapterError."""
    seen = set()
    for name in entries:
        if name == full_weight or name.endswith(OWN_WEIGHTS):
            continue
        for side in (*SIDES, *TABLE_SIDES):
            if name.startswith(PREFIX) and name.endswith(side):
                module = name.removeprefix(PREFIX).removesuffix(side)
                break
        else:
            raise AdapterError(
                f"{TENSORS} has {short(name)}; only these tensors are supported: "
                f"{PREFIX}<module>.lora_A.weight and .lora_B.weight"
            )
        if module not in seen:
            seen.add(module)
            yield module


def _require_lora(config: JsonMapping) -> None:
    """Raises AdapterError if the adapter needs another formula."""
    for key, name in OTHER_METHODS.items():
        if config.get(key):
            raise AdapterError(f"{key} is {short(config[key])}: {name} is not supported")
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterError(f"bias is {short(bias)}; only none is supported")
    start = config.get("init_lora_weights", True)
    if not any(start is each or start == each for each in STARTS):
        raise AdapterError(
            f"init_lora_weights is {short(start)}, which also changes the weights of the model: "
            "not supported; convert the adapter to a plain one"
        )
    for key, value in config.items():
        is_method = key.startswith("use_") or key.endswith("_config")
        if is_method and value and key not in ("use_rslora", *HARMLESS):
            raise AdapterError(f"{short(key)} is set; weft does not know this key")


KINDS = {"LORA": read_lora}

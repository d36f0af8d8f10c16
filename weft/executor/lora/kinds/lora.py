"""LoRA, as the package peft saves it.

    base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight
    of an embedding .lora_embedding_A, .lora_embedding_B
    with DoRA .lora_magnitude_vector [out]; with lora_bias .lora_B.bias [out]

A module of the model becomes y = W x + scale B (A x). With DoRA, each row of W + scale B A becomes
as long as the adapter says. The tensors of an adapter say which modules it changes;
`lora_replaced.py` reads what it replaces. Anything that needs another formula, or other weights of
the model, is refused by its name.

Source: LoRA, arXiv:2106.09685; the scale of use_rslora: arXiv:2312.03732; DoRA: arXiv:2402.09353.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from weft.config.projections import HEAD, ExpertSlice, Projection
from weft.executor.lora.kinds.kind import (
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
from weft.executor.lora.kinds.lora_replaced import (
    bias_alone,
    replaced_matrix,
    require_saved,
    rows_of_tokens,
)
from weft.executor.lora.kinds.lora_tensors import TensorKind, Tensors, by_module
from weft.json_types import JsonMapping
from weft.weights.base import in_base
from weft.weights.safetensors import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

# Of the modules that peft writes with wrappers, and of the experts that are one tensor.
BASE_LAYER = ".base_layer"
SIDES = (TensorKind.A, TensorKind.B)
TABLE_SIDES = (TensorKind.TABLE_A, TensorKind.TABLE_B)
# Of `init_lora_weights`: the other values change the weights of the model.
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
BIASES = ("none", "all", "lora_only")
# Settings that change the formula, or train something besides what is read here.
OTHER_METHODS = {
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
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
    modules = by_module(entries)
    require_saved(config, modules)
    reading = _Reading(config, known, max_rank)
    found: dict[str, StoredPair] = {}
    for written, tensors in modules.items():
        for module, pair in reading.pairs(written, tensors).items():
            if module in found:
                raise AdapterError(f"the adapter has {short(module)} twice")
            found[module] = pair
    if not found:
        raise AdapterError("the adapter has no tensors")
    if config.get("ensure_weight_tying") and any(name in found for name in reading.ends):
        raise AdapterError(
            "ensure_weight_tying is set: one A and B for embedding and head is not supported"
        )
    _follow_embedding(found, reading)
    return found


class _Reading:
    """The settings of an adapter, and the modules of the model."""

    def __init__(self, config: JsonMapping, known: Mapping[str, Projection], max_rank: int) -> None:
        self.sizes = {in_base(name): one for name, one in known.items()}
        self.ends = [in_base(name) for name, one in known.items() if one.is_table or name == HEAD]
        self._config = config
        self._max_rank = max_rank
        self._has_root = bool(config.get("use_rslora", False))
        self._scales = FactorScales(config, "lora_alpha", has_root=self._has_root)
        self._has_lengths = bool(config.get("use_dora", False))
        self._layers = named_layers(config)
        self._stacks = _stacks(known)

    def pairs(self, written: str, tensors: Tensors) -> dict[str, StoredPair]:
        """What the tensors of a module in the file are, by module. Raises AdapterError."""
        if TensorKind.OWN in tensors:
            self._check_own_weights(written, tensors.pop(TensorKind.OWN))
            if not tensors:
                return {}
        module = in_base(written)
        stack = self._stacks.get(_without_layers(module))
        if stack is not None and tensors.keys() <= set(SIDES):
            return _stacked(written, tensors, stack, self.sizes, self._scales, self._max_rank)
        if TensorKind.FULL in tensors:
            pair = self._replaced(written, module, tensors)
        elif module not in self.sizes:
            raise AdapterError(
                f"the adapter changes {short(written)}, which adapters cannot do in this model; "
                f"they can in {endings(self.sizes)}"
            )
        elif TensorKind.TOKENS in tensors:
            pair = self._tokens(written, module, tensors)
        elif tensors.keys() == {TensorKind.BIAS}:
            pair = bias_alone(self.sizes[module])
        else:
            pair = self._factors(written, self.sizes[module], tensors)
        if TensorKind.BIAS in tensors:
            if module not in self.sizes or self.sizes[module].is_table:
                raise AdapterError(f"the adapter has a bias of {short(written)}, which has none")
            if self.sizes[module].stack is not None:
                raise AdapterError(f"biases of experts are not supported: {short(written)}.bias")
            check_entry(tensors[TensorKind.BIAS], (self.sizes[module].out_size,))
            pair = pair._replace(bias=tensors[TensorKind.BIAS])
        return {module: pair}

    def _factors(self, written: str, one: Projection, tensors: Tensors) -> StoredPair:
        """A and B of a module."""
        layer = layer_of(in_base(written))
        if self._layers is not None and layer not in self._layers:
            raise AdapterError(
                f"the adapter changes {short(written)}, which is not in layers_to_transform"
            )
        sides = (
            (TensorKind.TABLE_A, TensorKind.TABLE_B)
            if one.is_table
            else (TensorKind.A, TensorKind.B)
        )
        allowed = {*sides, TensorKind.LENGTH, TensorKind.BIAS} | (
            set() if one.is_table else {TensorKind.SHIFT}
        )
        _require_tensors(written, tensors, sides, allowed)
        a, b = (tensors[side] for side in sides)
        rank = self._scales.rank(written)
        check_rank(written, rank, self._max_rank)
        check_entry(a, (rank, one.in_size))
        check_entry(b, (one.out_size, rank))
        pair = StoredPair((a, b), rank, self._scales.scale(written, rank), _both)
        if self._has_lengths != (TensorKind.LENGTH in tensors):
            has = "no" if self._has_lengths else "a"
            raise AdapterError(
                f"use_dora is {self._has_lengths}, but the adapter has {has} "
                f"{short(written)}{TensorKind.LENGTH}"
            )
        for kind in (TensorKind.LENGTH, TensorKind.SHIFT):
            if kind in tensors:
                check_entry(tensors[kind], (one.out_size,))
                if one.stack is not None:
                    raise AdapterError(f"{short(written)}{kind} of an expert is not supported")
        return pair._replace(
            length=tensors.get(TensorKind.LENGTH), shift=tensors.get(TensorKind.SHIFT)
        )

    def _replaced(self, written: str, module: str, tensors: Tensors) -> StoredPair:
        _require_tensors(written, tensors, (TensorKind.FULL,), {TensorKind.FULL, TensorKind.BIAS})
        one = self.sizes.get(module)
        return replaced_matrix(written, tensors[TensorKind.FULL], one, self.sizes, self._max_rank)

    def _tokens(self, written: str, module: str, tensors: Tensors) -> StoredPair:
        _require_tensors(written, tensors, (TensorKind.TOKENS,), {TensorKind.TOKENS})
        if module not in self.ends:
            raise AdapterError(f"the adapter has rows of tokens of {short(written)}")
        one = self.sizes[module]
        return rows_of_tokens(
            self._config, written, tensors[TensorKind.TOKENS], one, self._max_rank
        )

    def _check_own_weights(self, written: str, entry: TensorEntry) -> None:
        """Check that weights of the model in the file are those of the embedding or the head, with
        the right shape. They equal the model's and are not read."""
        module = in_base(written)
        if module not in self.ends:
            raise AdapterError(f"{TENSORS} has {short(entry.name)}, which are weights of the model")
        check_entry(entry, self.sizes[module].stored_shape)


def _require_tensors(
    written: str, tensors: Tensors, needed: Sequence[TensorKind], allowed: set[TensorKind]
) -> None:
    """Raises AdapterError unless the tensors are what one way of changing a module has."""
    for kind in needed:
        if kind not in tensors:
            raise AdapterError(f"the adapter has no {short(written)}{kind}")
    for kind, entry in tensors.items():
        if kind not in allowed:
            raise AdapterError(
                f"the adapter has {short(entry.name)} beside {short(written)}{needed[0]}"
            )


def _follow_embedding(found: dict[str, StoredPair], reading: _Reading) -> None:
    """Where the head is the embedding, new rows of tokens are also those of the head."""
    table = next(name for name in reading.ends if reading.sizes[name].is_table)
    head = reading.sizes.get(HEAD)
    if head is None or not head.is_tied or table not in found or not found[table].ids:
        return
    if HEAD in found:
        raise AdapterError(
            f"the adapter has rows of tokens of {short(table)}, which is also the head, and "
            "changes the head otherwise"
        )
    found[HEAD] = found[table]


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
    tensors: Tensors,
    stacks: Mapping[tuple[int, int], Mapping[str, ExpertSlice]],
    sizes_of: Mapping[str, Projection],
    scales: FactorScales,
    max_rank: int,
) -> dict[str, StoredPair]:
    """The pairs of all experts whose A are in one tensor, [experts rank, in], and whose B are in
    another, [out, rank experts]. Raises AdapterError."""
    _require_tensors(written, tensors, SIDES, set(SIDES))
    a, b = tensors[TensorKind.A], tensors[TensorKind.B]
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


def _require_lora(config: JsonMapping) -> None:
    """Raises AdapterError if the adapter needs another formula."""
    for key, name in OTHER_METHODS.items():
        if config.get(key):
            raise AdapterError(f"{key} is {short(config[key])}: {name} is not supported")
    bias = config.get("bias", "none")
    if bias not in BIASES:
        raise AdapterError(f"bias is {short(bias)}; {', '.join(BIASES)} are supported")
    start = config.get("init_lora_weights", True)
    if not any(start is each or start == each for each in STARTS):
        raise AdapterError(
            f"init_lora_weights is {short(start)}, which also changes the weights of the model: "
            "not supported; convert the adapter to a plain one"
        )
    for key, value in config.items():
        is_method = key.startswith("use_") or key.endswith("_config")
        if is_method and value and key not in ("use_rslora", "use_dora", *HARMLESS):
            raise AdapterError(f"{short(key)} is set; weft does not know this key")


KINDS = {"LORA": read_lora}

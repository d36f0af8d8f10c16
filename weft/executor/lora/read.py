"""Reads adapters (LoRA) in the format of the package peft: checks what a folder contains.

    adapter_config.json          rank, scale, and what else was trained
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [rank, in], .lora_B.weight
                                 of an embedding .lora_embedding_A, .lora_embedding_B
                                 of the labels of a classifier .weight [labels, in], which replaces

A module of the model becomes y = W x + scale B (A x). The tensors of an adapter say which modules
it changes. Anything that needs another formula, or other weights of the model, is refused by its
name. Nothing is unpickled. This module imports no torch: `pairs.py` reads the values.

Source: LoRA, arXiv:2106.09685; the scale of use_rslora: arXiv:2312.03732.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.automaton import BadPattern
from weft.config.model import BadCheckpoint, ModelConfig, ModelError
from weft.config.projections import (
    HEAD,
    LABELS,
    ExpertPlace,
    Projection,
    projections,
    target_of,
)
from weft.executor.lora.patterns import ModulePatterns
from weft.json_types import JsonMapping
from weft.weights.base import in_base
from weft.weights.regular_file import RegularFile
from weft.weights.safetensors import BytesContent, FileContent, TensorEntry

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
ADDED_TOKENS = "added_tokens.json"

MAX_RANK = 512  # if no other limit is set
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRY_BYTES = 1024  # of a tensor in the header
PIECE_BYTES = 1 << 20  # bytes that are hashed at once

PREFIX = "base_model.model."
SIDES = (".lora_A.weight", ".lora_B.weight")
TABLE_SIDES = (".lora_embedding_A", ".lora_embedding_B")
CLASSIFIERS = (LABELS, "classifier")  # peft's names of every classifier
WHOLE = ".weight"  # of a matrix that was trained as a whole
# Of the embedding and the head, besides A and B: peft also writes the model's own weights.
BASE_LAYER = ".base_layer"
OWN_WEIGHTS = f"{BASE_LAYER}.weight"
FLOATS = ("F32", "F16", "BF16")
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


class AdapterError(ModelError):
    """The adapter cannot be used; the message says why, without a path."""


class AdapterInfo(NamedTuple):
    """Facts about an adapter, before its values are read."""

    uid: str  # 32 hexadecimal digits of the digest of both files
    rank: int  # the largest of its modules
    num_bytes: int  # of its tensors in the file
    targets: tuple[str, ...]  # names of its modules (`target_of`), sorted


class StoredPair(NamedTuple):
    """A and B of one module, as entries of the file; or one matrix, `a`, which replaces that of the
    model. `stack`: both are stacked for all experts, and the module is one part."""

    a: TensorEntry
    b: TensorEntry | None
    scale: float
    stack: ExpertPlace | None = None

    @property
    def rank(self) -> int:
        num_stacked = 1 if self.stack is None else self.stack.num_experts
        return self.a.shape[0] // num_stacked

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (self.a,) if self.b is None else (self.a, self.b)


class LoadedFiles(NamedTuple):
    """Both files in memory, checked except for the values."""

    info: AdapterInfo
    pairs: dict[str, StoredPair]  # by module, in the base model
    content: BytesContent


def inspect_adapter(folder: Path | str, model: ModelConfig, *, max_rank: int = 0) -> AdapterInfo:
    """Check the adapter in a folder against the model, except for its values.

    `max_rank` 0: MAX_RANK. Takes the memory of a header, and the time to hash the file. Raises
    AdapterError.
    """
    folder = Path(folder)
    known = projections(model)
    config = _read_small(folder, CONFIG)
    try:
        with FileContent(_tensor_file(folder, known, max_rank or MAX_RANK), TENSORS) as file:
            pairs = _pairs(_parsed(config, CONFIG), file.entries, known, max_rank or MAX_RANK)
            _check_tokens(folder, model)
            digest = hashlib.sha256(config)
            for start in range(0, file.num_bytes, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, file.num_bytes - start))
                file.read_into(start, memoryview(piece))
                digest.update(piece)
    except BadCheckpoint as exc:
        raise AdapterError(str(exc)) from exc
    return _info(digest.hexdigest(), pairs, known)


def read_files(folder: Path | str, model: ModelConfig, *, max_rank: int = 0) -> LoadedFiles:
    """The same, with the files in memory. They are read once, so the digest is that of the used
    bytes. Raises AdapterError."""
    folder = Path(folder)
    known = projections(model)
    config = _read_small(folder, CONFIG)
    try:
        with RegularFile(_tensor_file(folder, known, max_rank or MAX_RANK), TENSORS) as file:
            data = bytearray(file.num_bytes)
            file.read_into(0, memoryview(data))
        content = BytesContent(data, TENSORS)
    except BadCheckpoint as exc:
        raise AdapterError(str(exc)) from exc
    pairs = _pairs(_parsed(config, CONFIG), content.entries, known, max_rank or MAX_RANK)
    _check_tokens(folder, model)
    digest = hashlib.sha256(config)
    digest.update(data)
    return LoadedFiles(_info(digest.hexdigest(), pairs, known), pairs, content)


def _info(
    digest: str, pairs: Mapping[str, StoredPair], known: Mapping[str, Projection]
) -> AdapterInfo:
    sizes = {in_base(name): one for name, one in known.items()}
    targets = {target_of(module, sizes[module]) for module in pairs}
    entries = {entry.name: entry for pair in pairs.values() for entry in pair.entries}
    return AdapterInfo(
        uid=digest[:32],
        rank=max(pair.rank for pair in pairs.values()),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        targets=tuple(sorted(targets)),
    )


# Files


def _tensor_file(folder: Path, known: Mapping[str, Projection], max_rank: int) -> Path:
    """The file with the tensors, if its size is possible for the model. Raises AdapterError, and
    BadCheckpoint if it cannot be read."""
    if not known:
        raise AdapterError("adapters are not supported for this kind of model")
    path = folder / TENSORS
    if not path.exists():
        if (folder / PICKLED).exists():
            raise AdapterError(
                f"the adapter has only {PICKLED}, a pickle file, which weft never reads: save it "
                f"as {TENSORS}"
            )
        raise AdapterError(f"there is no {TENSORS} in the folder of the adapter")
    num_values = sum(max_rank * (one.in_size + one.out_size) for one in known.values())
    # Including the model's own weights of the embedding and the head.
    num_values += 2 * max(one.in_size * one.out_size for one in known.values() if one.is_table)
    header_bytes = MAX_CONFIG_BYTES + 2 * MAX_ENTRY_BYTES * len(known)
    with RegularFile(path, TENSORS) as file:
        most = 4 * num_values + header_bytes
        if file.num_bytes > most:
            raise AdapterError(
                f"{TENSORS} has {file.num_bytes:,} bytes; an adapter of this model, with ranks up "
                f"to {max_rank} (--max-lora-rank), has at most {most:,}"
            )
        if file.num_bytes >= 8:
            start = bytearray(8)
            file.read_into(0, memoryview(start))
            said = int.from_bytes(start, "little")
            if said > header_bytes:
                raise AdapterError(
                    f"{TENSORS} is damaged, or of another model: its header has {said:,} bytes; "
                    f"at most {header_bytes:,} are expected"
                )
    return path


def _read_small(folder: Path, name: str) -> bytes:
    """A small file of the folder. Raises AdapterError."""
    if not (folder / name).exists():
        raise AdapterError(f"there is no {name} in the folder of the adapter")
    try:
        with RegularFile(folder / name, name) as file:
            if file.num_bytes > MAX_CONFIG_BYTES:
                raise AdapterError(
                    f"{name} has {file.num_bytes:,} bytes; at most {MAX_CONFIG_BYTES:,} are read"
                )
            data = bytearray(file.num_bytes)
            file.read_into(0, memoryview(data))
    except BadCheckpoint as exc:
        raise AdapterError(str(exc)) from exc
    return bytes(data)


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise AdapterError(f"{name} is not JSON") from exc
    if not isinstance(found, dict):
        raise AdapterError(f"{name} is not a JSON object")
    return found


def _check_tokens(folder: Path, model: ModelConfig) -> None:
    """Check that added tokens are in the vocabulary. Raises AdapterError."""
    if not (folder / ADDED_TOKENS).exists():
        return
    added = _parsed(_read_small(folder, ADDED_TOKENS), ADDED_TOKENS)
    for token, id in added.items():
        if type(id) is not int or not 0 <= id < model.vocab_size:
            raise AdapterError(
                f"{ADDED_TOKENS} gives {token[:64]!r} the id {_short(id)}; the model has 0 to "
                f"{model.vocab_size - 1:,}"
            )


# Contents


def _pairs(
    config: JsonMapping,
    entries: Mapping[str, TensorEntry],
    known: Mapping[str, Projection],
    max_rank: int,
) -> dict[str, StoredPair]:
    """A and B of each module. Raises AdapterError."""
    _require_lora(config)
    _require_known_whole(config, known)
    scales = _Scales(config)
    layers = _layers(config)
    sizes = {in_base(name): size for name, size in known.items()}
    found: dict[str, StoredPair] = {}
    whole = PREFIX + LABELS + WHOLE
    stacks = _stacks(known)
    for written in _modules(entries, whole):
        module = in_base(written)
        if _without_layers(module) in stacks:
            found |= _stacked(written, entries, stacks[_without_layers(module)], scales, max_rank)
            continue
        if module not in sizes:
            raise AdapterError(
                f"the adapter changes {_short(written)}, which adapters cannot do in this model; "
                f"they can in {_endings(sizes)}"
            )
        if module in found:
            raise AdapterError(f"the adapter has {_short(module)} twice")
        if layers is not None and _layer_of(module) not in layers:
            raise AdapterError(
                f"the adapter changes {_short(written)}, which is not in layers_to_transform"
            )
        sides = TABLE_SIDES if sizes[module].is_table else SIDES
        for side in sides:
            if PREFIX + written + side not in entries:
                raise AdapterError(f"the adapter has no {_short(written)}{side}")
        a, b = (entries[PREFIX + written + side] for side in sides)
        rank = scales.rank(written)
        _check_rank(written, rank, max_rank)
        _check_entry(a, (rank, sizes[module].in_size))
        _check_entry(b, (sizes[module].out_size, rank))
        found[module] = StoredPair(a, b, scales.scale(written, rank))
    if whole in entries:
        found |= _labels(entries[whole], sizes, found, max_rank)
    if not found:
        raise AdapterError("the adapter has no tensors")
    ends = [in_base(name) for name, one in known.items() if one.is_table or name == HEAD]
    _check_own_weights(entries, {name: sizes[name] for name in ends})
    if config.get("ensure_weight_tying") and any(name in found for name in ends):
        raise AdapterError(
            "ensure_weight_tying is set: one A and B for embedding and head is not supported"
        )
    return found


Stacks = dict[str, dict[tuple[int, int], dict[str, ExpertPlace]]]


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
    stacks: Mapping[tuple[int, int], Mapping[str, ExpertPlace]],
    scales: _Scales,
    max_rank: int,
) -> dict[str, StoredPair]:
    """The pairs of all experts whose A are in one tensor, [experts rank, in], and whose B are in
    another, [out, rank experts]. Raises AdapterError."""
    for side in SIDES:
        if PREFIX + written + side not in entries:
            raise AdapterError(f"the adapter has no {_short(written)}{side}")
    a, b = (entries[PREFIX + written + side] for side in SIDES)
    sizes = (a.shape[-1], b.shape[0])
    if sizes not in stacks:
        raise AdapterError(
            f"{_short(written)} has {sizes[0]} inputs and {sizes[1]} outputs; experts have "
            + " or ".join(f"{ins} and {outs}" for ins, outs in stacks)
        )
    parts = stacks[sizes]
    any_place = next(iter(parts.values()))
    rank = scales.rank(any_place.name)
    _check_rank(written, rank, max_rank)
    _check_entry(a, (rank * any_place.num_experts, sizes[0]))
    _check_entry(b, (sizes[1], rank * any_place.num_experts))
    scale = scales.scale(any_place.name, rank)
    return {module: StoredPair(a, b, scale, place) for module, place in parts.items()}


def _check_rank(written: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        raise AdapterError(
            f"the rank of {_short(written)} is {rank}; at most {max_rank} is allowed "
            "(--max-lora-rank)"
        )


def _check_own_weights(entries: Mapping[str, TensorEntry], ends: Mapping[str, Projection]) -> None:
    """Check that weights of the model in the file are those of the embedding or the head, with the
    right shape. They equal the model's and are not read. Raises AdapterError."""
    for name, entry in entries.items():
        if not name.endswith(OWN_WEIGHTS):
            continue
        module = in_base(name.removeprefix(PREFIX).removesuffix(OWN_WEIGHTS))
        if module not in ends:
            raise AdapterError(f"{TENSORS} has {_short(name)}, which are weights of the model")
        one = ends[module]
        shape = (one.out_size, one.in_size)
        _check_entry(entry, shape[::-1] if one.is_table else shape)


def _require_known_whole(config: JsonMapping, known: Mapping[str, Projection]) -> None:
    """Raises AdapterError for modules that were trained as a whole, except the labels of a
    classifier."""
    named = config.get("modules_to_save") or ()
    allowed = CLASSIFIERS if LABELS in known else ()
    if not isinstance(named, list | tuple) or any(name not in allowed for name in named):
        raise AdapterError(f"modules_to_save is {_short(named)}: whole modules are not supported")


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
    _check_entry(entry, (num_labels, sizes[LABELS].in_size))
    if num_labels > max_rank:
        raise AdapterError(
            f"the adapter has {LABELS} for {num_labels} labels; at most {max_rank} are allowed "
            "(--max-lora-rank)"
        )
    return {LABELS: StoredPair(entry, None, 1.0)}


def _check_entry(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise AdapterError(f"{_short(entry.name)} is {list(entry.shape)} instead of {list(shape)}")
    if entry.dtype not in FLOATS:
        raise AdapterError(
            f"{_short(entry.name)} is {entry.dtype}; supported are {', '.join(FLOATS)}"
        )


def _modules(entries: Mapping[str, TensorEntry], whole: str) -> Iterator[str]:
    """The modules of the pairs of tensors, with their names in the file. `whole`: the only allowed
    tensor that is not part of a pair. Raises AdapterError."""
    seen = set()
    for name in entries:
        if name == whole or name.endswith(OWN_WEIGHTS):
            continue
        for side in (*SIDES, *TABLE_SIDES):
            if name.startswith(PREFIX) and name.endswith(side):
                module = name.removeprefix(PREFIX).removesuffix(side)
                break
        else:
            raise AdapterError(
                f"{TENSORS} has {_short(name)}; only these tensors are supported: "
                f"{PREFIX}<module>.lora_A.weight and .lora_B.weight"
            )
        if module not in seen:
            seen.add(module)
            yield module


def _require_lora(config: JsonMapping) -> None:
    """Raises AdapterError if the adapter needs another formula."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type is {_short(kind)}; only LORA is supported")
    for key, name in OTHER_METHODS.items():
        if config.get(key):
            raise AdapterError(f"{key} is {_short(config[key])}: {name} is not supported")
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterError(f"bias is {_short(bias)}; only none is supported")
    start = config.get("init_lora_weights", True)
    if not any(start is each or start == each for each in STARTS):
        raise AdapterError(
            f"init_lora_weights is {_short(start)}, which also changes the weights of the model: "
            "not supported; convert the adapter to a plain one"
        )
    for key, value in config.items():
        is_method = key.startswith("use_") or key.endswith("_config")
        if is_method and value and key not in ("use_rslora", *HARMLESS):
            raise AdapterError(f"{_short(key)} is set; weft does not know this key")


class _Scales:
    """Ranks and scales of modules, by patterns of their names."""

    def __init__(self, config: JsonMapping) -> None:
        self._ranks = _BySetting(config, "rank_pattern", config.get("r", 8))
        self._alphas = _BySetting(config, "alpha_pattern", config.get("lora_alpha", 8))
        self._has_root = bool(config.get("use_rslora", False))

    def rank(self, module: str) -> int:
        value = self._ranks.value(module)
        if type(value) is not int or value < 1:
            raise AdapterError(
                f"the rank of {_short(module)} is {_short(value)}; "
                "a whole number above 0 is expected"
            )
        return value

    def scale(self, module: str, rank: int) -> float:
        alpha = self._alphas.value(module)
        if type(alpha) not in (int, float) or not abs(alpha) < 1e6:
            raise AdapterError(
                f"lora_alpha of {_short(module)} is {_short(alpha)}; "
                "a number below 1,000,000 is expected"
            )
        return float(alpha / math.sqrt(rank) if self._has_root else alpha / rank)


class _BySetting:
    """The values that a setting gives to modules, by patterns of their names."""

    def __init__(self, config: JsonMapping, key: str, otherwise: Any) -> None:
        self._key = key
        self._otherwise = otherwise
        given = config.get(key) or {}
        if not isinstance(given, dict):
            raise AdapterError(f"{key} is not an object")
        try:
            self._patterns = ModulePatterns(given)
        except BadPattern as exc:
            raise AdapterError(f"{key}: {_short(str(exc))}") from exc

    def value(self, module: str) -> Any:
        try:
            return self._patterns.value(module, self._otherwise)
        except BadPattern as exc:
            raise AdapterError(f"{self._key}: {_short(str(exc))}") from exc


def _layers(config: JsonMapping) -> frozenset[int] | None:
    """The layers that the adapter claims to change; None: the settings name none."""
    given = config.get("layers_to_transform")
    if given is None:
        return None
    numbers = given if isinstance(given, list) else [given]
    if not all(type(number) is int for number in numbers):
        raise AdapterError(
            f"layers_to_transform is {_short(given)}; numbers of layers are expected"
        )
    return frozenset(numbers)


def _layer_of(module: str) -> int | None:
    for part in module.split("."):
        if part.isdecimal():
            return int(part)
    return None


def _endings(modules: Mapping[str, Projection]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in modules}))


def _short(value: object) -> str:
    """The value for a message: one line of limited length."""
    text = value if isinstance(value, str) else repr(value)
    return text.encode("unicode_escape").decode()[:200]

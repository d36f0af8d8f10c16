"""Reads adapters in the format of the package peft: checks what a folder contains.

    adapter_config.json          rank, scale, and what else was trained
    adapter_model.safetensors    tensors, which the kind of the adapter knows (`kinds/`)

Nothing is unpickled. This module imports no torch: `pairs.py` reads the values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.model import BadCheckpoint, ModelConfig
from weft.config.projections import Projection, projections, target_of
from weft.executor.lora.kinds.kind import TENSORS, AdapterError, StoredPair, short
from weft.executor.lora.kinds.table import kind_of
from weft.json_types import JsonMapping
from weft.weights.base import in_base
from weft.weights.regular_file import RegularFile
from weft.weights.safetensors import BytesContent, FileContent, TensorEntry

CONFIG = "adapter_config.json"
PICKLED = "adapter_model.bin"
ADDED_TOKENS = "added_tokens.json"

MAX_RANK = 512  # if no other limit is set
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRY_BYTES = 1024  # of a tensor in the header
PIECE_BYTES = 1 << 20  # bytes that are hashed at once


class AdapterInfo(NamedTuple):
    """Facts about an adapter, before its values are read."""

    uid: str  # 32 hexadecimal digits of the digest of both files
    rank: int  # the largest of its modules
    num_bytes: int  # of its tensors in the file
    targets: tuple[str, ...]  # names of its modules (`target_of`), sorted


class LoadedFiles(NamedTuple):
    """Both files in memory, checked except for the values."""

    info: AdapterInfo
    pairs: dict[str, StoredPair]  # by module, in the base model
    content: BytesContent


def inspect_adapter(
    folder: Path | str, model: ModelConfig, *, max_rank: int = 0, full_modules: str = ""
) -> AdapterInfo:
    """Check the adapter in a folder against the model, except for its values.

    `max_rank` 0: MAX_RANK. `full_modules`: as `projections` says. Takes the memory of a header, and
    the time to hash the file. Raises AdapterError.
    """
    folder = Path(folder)
    known = projections(model, full_modules)
    config = _read_small(folder, CONFIG)
    try:
        with FileContent(_tensor_file(folder, known, max_rank or MAX_RANK), TENSORS) as file:
            pairs = _pairs(config, file.entries, known, max_rank or MAX_RANK)
            _check_tokens(folder, model)
            digest = hashlib.sha256(config)
            for start in range(0, file.num_bytes, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, file.num_bytes - start))
                file.read_into(start, memoryview(piece))
                digest.update(piece)
    except BadCheckpoint as exc:
        raise AdapterError(str(exc)) from exc
    return _info(digest.hexdigest(), pairs, known)


def read_files(
    folder: Path | str, model: ModelConfig, *, max_rank: int = 0, full_modules: str = ""
) -> LoadedFiles:
    """The same, with the files in memory. They are read once, so the digest is that of the used
    bytes. Raises AdapterError."""
    folder = Path(folder)
    known = projections(model, full_modules)
    config = _read_small(folder, CONFIG)
    try:
        with RegularFile(_tensor_file(folder, known, max_rank or MAX_RANK), TENSORS) as file:
            data = bytearray(file.num_bytes)
            file.read_into(0, memoryview(data))
        content = BytesContent(data, TENSORS)
    except BadCheckpoint as exc:
        raise AdapterError(str(exc)) from exc
    pairs = _pairs(config, content.entries, known, max_rank or MAX_RANK)
    _check_tokens(folder, model)
    digest = hashlib.sha256(config)
    digest.update(data)
    return LoadedFiles(_info(digest.hexdigest(), pairs, known), pairs, content)


def _pairs(
    data: bytes,
    entries: Mapping[str, TensorEntry],
    known: Mapping[str, Projection],
    max_rank: int,
) -> dict[str, StoredPair]:
    """A and B of each module. Raises AdapterError."""
    config: JsonMapping = _parsed(data, CONFIG)
    return kind_of(config)(config, entries, known, max_rank)


def _info(
    digest: str, pairs: Mapping[str, StoredPair], known: Mapping[str, Projection]
) -> AdapterInfo:
    sizes = {in_base(name): one for name, one in known.items()}
    targets = {target_of(module, sizes[module]) for module in pairs}
    entries = {entry.name: entry for pair in pairs.values() for entry in pair.all_entries}
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
    num_values = 0
    for one in known.values():
        # Beside A and B: a length, a bias and a shift of each output.
        num_values += one.most_rank(max_rank) * (one.in_size + one.out_size) + 3 * one.out_size
    # Including the model's own weights of the embedding and the head.
    num_values += 2 * max(one.in_size * one.out_size for one in known.values() if one.is_table)
    header_bytes = MAX_CONFIG_BYTES + 5 * MAX_ENTRY_BYTES * len(known)
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
                f"{ADDED_TOKENS} gives {token[:64]!r} the id {short(id)}; the model has 0 to "
                f"{model.vocab_size - 1:,}"
            )

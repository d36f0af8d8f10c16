"""What a model is, from its files' own headers: nothing is loaded, and nothing is guessed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.gguf import GgufModel, hf_config
from weft.config.model import ModelConfig, ModelError
from weft.json_types import JsonMapping
from weft.store.entries import Entry
from weft.weights.fetch import model_in, weight_files
from weft.weights.gguf import files as gguf_files
from weft.weights.gguf.blocks import BLOCKS
from weft.weights.gguf.reader import GgufFile
from weft.weights.safetensors import FileContent, TensorEntry

# llama.cpp's names for the types of most weights of a file, by its number `general.file_type`.
FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S"},
    **{17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS"},
    **{23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S"},
    **{29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4"},
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
READ_BYTES = 1 << 22


class ModelDetails(NamedTuple):
    """Facts of a model. Zero or empty: its files do not say."""

    name: str
    format: str  # gguf or safetensors
    family: str  # qwen3
    architecture: str  # Qwen3ForCausalLM
    num_parameters: int
    size_bytes: int  # of the weight files
    quantization: str  # of the stored weights: Q4_K_M, BF16
    context_length: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    template: str
    license: str
    problem: str = ""  # why weft cannot serve it; "": it can


def details(entry: Entry) -> ModelDetails:
    """The facts of a model. Raises ModelError if its files cannot be read."""
    path = entry.path if entry.is_gguf else model_in(entry.path)
    if gguf_files.is_gguf(path):
        return _of_gguf(entry.name, path)
    return _of_folder(entry.name, path)


def weights_of(entry: Entry) -> list[Path]:
    """The files with the weights of a model. Raises ModelNotFound."""
    return weights_in(entry.path)


def weights_in(path: Path) -> list[Path]:
    """The files with the weights of the model in a folder, or in a GGUF file. Raises
    ModelNotFound."""
    if gguf_files.is_gguf(path):
        return gguf_files.parts(path)
    return weight_files(path)


def digest(entry: Entry) -> str:
    """SHA-256 of the weights of a model. Raises ModelError and OSError."""
    return digest_of_files(weights_of(entry))


def digest_of_files(paths: Sequence[Path]) -> str:
    """SHA-256 of the only file, or of the digests of several. The hub's cache names its files by
    it; others are read. Raises OSError."""
    each = [_file_digest(path) for path in paths]
    if len(each) == 1:
        return each[0]
    return hashlib.sha256("\n".join(each).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    real = path.resolve()
    if _DIGEST.fullmatch(real.name):
        return real.name
    found = hashlib.sha256()
    with real.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            found.update(data)
    return found.hexdigest()


def _of_gguf(name: str, path: Path) -> ModelDetails:
    metadata: JsonMapping = {}
    tensors: dict[str, TensorEntry] = {}
    size = 0
    for number, part in enumerate(gguf_files.parts(path)):
        with GgufFile(part) as file:
            if number == 0:
                metadata = file.header.metadata
            tensors |= file.header.tensors
            size += file.num_bytes
    family = str(metadata.get("general.architecture", ""))
    config: dict[str, Any] = {}
    problem = ""
    try:
        config = dict(hf_config(GgufModel(str(path), metadata, tensors)))
        ModelConfig.from_hf(config, name)
    except ModelError as exc:
        problem = str(exc)
    level = FILE_TYPES.get(metadata.get("general.file_type", -1), "") or _most(tensors)
    return ModelDetails(
        name=name,
        format="gguf",
        family=family,
        architecture=str((config.get("architectures") or [""])[0]),
        num_parameters=_num_parameters(tensors),
        size_bytes=size,
        quantization=level,
        context_length=_number(metadata, f"{family}.context_length"),
        hidden_size=_number(metadata, f"{family}.embedding_length"),
        num_layers=_number(metadata, f"{family}.block_count"),
        num_heads=_number(metadata, f"{family}.attention.head_count"),
        num_kv_heads=_number(metadata, f"{family}.attention.head_count_kv"),
        vocab_size=_number(config, "vocab_size"),
        template=str(metadata.get("tokenizer.chat_template", "")),
        license=str(metadata.get("general.license", "")),
        problem=problem or _unread(tensors),
    )


def _of_folder(name: str, folder: Path) -> ModelDetails:
    tensors: dict[str, TensorEntry] = {}
    size = 0
    for path in weight_files(folder):
        with FileContent(path) as file:
            tensors |= file.entries
            size += file.num_bytes
    model = None
    problem = ""
    try:
        model = ModelConfig.from_folder(folder, name)
    except ModelError as exc:
        problem = str(exc)
    config = _json(folder / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    architecture = str((config.get("architectures") or [""])[0])
    stored = "" if model is None else model.stored.shown_name
    num_parameters = _num_parameters(tensors)
    if model is not None and model.stored.has_codes:
        num_parameters = model.num_parameters  # one word holds several codes
    return ModelDetails(
        name=name,
        format="safetensors",
        family=_KIND.sub("", architecture).lower() or str(config.get("model_type", "")),
        architecture=architecture,
        num_parameters=num_parameters,
        size_bytes=size,
        quantization=stored or _most(tensors),
        context_length=_number(config, "max_position_embeddings"),
        hidden_size=_number(config, "hidden_size"),
        num_layers=_number(config, "num_hidden_layers"),
        num_heads=_number(config, "num_attention_heads"),
        num_kv_heads=_number(config, "num_key_value_heads"),
        vocab_size=_number(config, "vocab_size"),
        template=_template(folder),
        license="",
        problem=problem,
    )


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8", "replace")
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(values: JsonMapping, key: str) -> int:
    found = values.get(key)
    if isinstance(found, Sequence) and not isinstance(found, str):  # one number per layer
        found = max((one for one in found if isinstance(one, int)), default=0)
    return int(found) if isinstance(found, int | float) and math.isfinite(found) else 0


def _num_parameters(tensors: dict[str, TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in tensors.values())


def _most(tensors: dict[str, TensorEntry]) -> str:
    """The type of most weights."""
    counts: Counter[str] = Counter()
    for entry in tensors.values():
        counts[entry.dtype] += math.prod(entry.shape)
    return max(counts, key=lambda name: counts[name], default="")


def _unread(tensors: dict[str, TensorEntry]) -> str:
    """Why these tensors cannot be read; "": they can."""
    read = {*BLOCKS, "F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
    others = sorted({entry.dtype for entry in tensors.values()} - read)
    return f"weft does not read weights of type {', '.join(others)}" if others else ""

"""What clients that list models are told about the served one: its family, size and format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config.model import read_json_if_there
from weft.server.context import ModelFacts

if TYPE_CHECKING:  # this takes a moment to import
    from weft.assemble.prepare import Prepared

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_KIND = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
_LEVEL = re.compile(
    r"[.-]((?:UD-)?I?Q[0-9]\w*|MXFP4|BF16|F16|F32)(?:-[0-9]{5}-of-[0-9]{5})?\.gguf$", re.IGNORECASE
)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def model_facts(prepared: Prepared) -> ModelFacts:
    """The facts of a model whose files are complete."""
    model = prepared.model
    files = [file for file in _files(prepared.folder) if file.suffix in WEIGHTS]
    is_gguf = any(file.suffix == ".gguf" for file in files)
    return ModelFacts(
        family=_KIND.sub("", model.architecture).lower(),
        format="gguf" if is_gguf else "safetensors",
        num_parameters=model.num_parameters,
        quantization=_level(prepared, files),
        folder=str(prepared.folder),
        size_bytes=sum(file.stat().st_size for file in files),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
    )


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [file for file in folder.iterdir() if file.is_file()]


def _level(prepared: Prepared, files: list[Path]) -> str:
    """The format of the stored weights, as llama.cpp names it where it has a name."""
    for file in files:
        named = _LEVEL.search(file.name)
        if named is not None:
            return named[1].upper()
    if prepared.model.stored.shown_name:
        return prepared.model.stored.shown_name
    config = read_json_if_there(prepared.folder / "config.json")
    stored = config.get("dtype") or config.get("torch_dtype") or prepared.model.dtype
    return _DTYPES.get(str(stored), str(stored))

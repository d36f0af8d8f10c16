"""Checks that a model folder is complete, and reads what it contains: the names, sizes and headers
of its files, and a few values of each weight.

It reads only the beginning of each weight, so a check takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.config.model import BadCheckpoint, ModelConfig, ModelNotFound
from weft.config.quantized import Quantization
from weft.weights.contents import labelled, open_contents
from weft.weights.fetch import weight_files
from weft.weights.gguf.blocks import BLOCKS
from weft.weights.packed.sizes import coded_size
from weft.weights.safetensors import Content, TensorEntry

NUM_LOOKED_AT = 64  # values or blocks that are checked at the beginning of each weight


FLOATS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def check_files(folder: Path, *, weights: bool = True) -> None:
    """Raise ModelError unless `folder` has a tokenizer and complete files of weights, and each
    weight begins with finite numbers. Takes milliseconds."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json, so it is not a model folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(
            f"{folder} has no tokenizer.json; weft reads tokenizers in this format only"
        )
    if weights:
        check_weights(folder)


def check_weights(folder: Path) -> None:
    """Raise ModelError unless the files of weights are complete, and each weight begins with finite
    numbers."""
    with ExitStack() as stack:
        for content in _contents(stack, folder):
            _check_values(content)


def read_model(folder: Path, name: str, *, weights: bool = True) -> ModelConfig:
    """The model that `config.json` describes, with the number of its weights that are codes. With
    `weights` False the weights will be random, so none are codes. Raises ModelError."""
    model = ModelConfig.from_folder(folder, name)
    if not weights:
        return replace(model, stored=Quantization())
    if not model.stored.has_codes or model.coded_bytes:
        return model
    found = coded_size(read_headers(folder), model.stored)
    return replace(
        model,
        num_coded=found.num_weights,
        num_wide=found.num_wide,
        coded_bytes=found.num_bytes,
    )


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """The entries of all tensors in a folder, by name. Raises ModelError."""
    found: dict[str, TensorEntry] = {}
    with ExitStack() as stack:
        for content in _contents(stack, folder):
            found |= content.entries
    return found


def _contents(stack: ExitStack, folder: Path) -> Sequence[Content]:
    return open_contents(stack, labelled(weight_files(folder)))


def _check_values(content: Content) -> None:
    """Raise BadCheckpoint for a weight that begins with NaN or infinite values: every request of
    such a model would fail."""
    for entry in content.entries.values():
        if entry.num_bytes and not _has_numbers(content, entry):
            raise BadCheckpoint(
                f"{content.label} is damaged: {entry.name[:200]} holds values that are not "
                "finite numbers"
            )


def _has_numbers(content: Content, entry: TensorEntry) -> bool:
    """Whether the first values of a weight contain no NaN, and not only infinite values. True for
    types that have neither."""
    blocks = BLOCKS.get(entry.dtype)
    if blocks is not None:
        first = _first_bytes(content, entry, blocks.num_bytes)
        return blocks.parts(first[None]).is_finite
    dtype = FLOATS.get(entry.dtype)
    if dtype is None:
        return True
    values = _first_bytes(content, entry, np.dtype(dtype).itemsize).view(dtype)
    if entry.dtype == "BF16":
        # The upper halves of float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if np.isnan(values).any():
        return False
    # A tensor without dimensions is the limit of a product, which may have none.
    return not np.isinf(values).all() or not entry.shape


def _first_bytes(content: Content, entry: TensorEntry, num_bytes: int) -> NDArray[np.uint8]:
    """The first values or blocks of a weight, of `num_bytes` each."""
    data = bytearray(min(entry.num_bytes, NUM_LOOKED_AT * num_bytes))
    content.read_into(entry.start, memoryview(data))
    return np.frombuffer(data, np.uint8)

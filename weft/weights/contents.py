"""Opens the weight files of a model, of any format, as `Content` from which weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from weft.weights.gguf.content import GgufContent, check_split
from weft.weights.gguf.encoder import EncoderContent, is_encoder
from weft.weights.gguf.files import SUFFIX
from weft.weights.safetensors import FileContent


def labelled(paths: Iterable[Path]) -> dict[str, Path]:
    """The files by their labels for error messages: the path of a file, or of the GGUF file that a
    generated folder describes (`assemble/model_folder.py`)."""
    found = {}
    for path in paths:
        label = str(path)
        if path.name.endswith(SUFFIX) and path.is_symlink():
            target = os.readlink(path)
            # In the hub's cache, the targets of links are named by digests.
            if target.endswith(SUFFIX):
                label = target
        found[label] = path
    return found


def open_contents(
    stack: ExitStack, paths: Mapping[str, Path]
) -> Sequence[FileContent] | Sequence[GgufContent | EncoderContent]:
    """Open the files `paths`, by their labels for error messages; `stack` closes them. All are of
    one format.

    Raises BadCheckpoint and UnsupportedModel.
    """
    # In the hub's cache, a file is a link to a file with another name.
    if not any(name.endswith(SUFFIX) for name in paths):
        return [stack.enter_context(FileContent(path, name)) for name, path in paths.items()]
    parts: list[GgufContent] = []
    encoders: list[EncoderContent] = []
    for name, path in paths.items():
        if parts and is_encoder(path):
            encoders.append(stack.enter_context(EncoderContent(path, name)))
            continue
        metadata = None
        if parts:
            metadata = parts[0].header.metadata
        parts.append(stack.enter_context(GgufContent(path, name, metadata)))
    check_split(parts)
    both: list[GgufContent | EncoderContent] = [*parts, *encoders]
    return both

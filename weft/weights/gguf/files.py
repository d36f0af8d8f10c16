"""Groups GGUF files into models, by their names alone.

A large model is divided into parts, model-00001-of-00003.gguf and so on. A folder or a repository
on the hub often has the same model in several types: model.Q4_K_M.gguf, model-Q8_0.gguf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TypeVar

from weft.config.model import ModelNotFound

P = TypeVar("P", bound=PurePath)

SUFFIX = ".gguf"
MAX_PARTS = 10_000
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
ENCODER = "mmproj"  # in the name of a file with the encoder of a model
_WORD = re.compile(r"[^-._]+")
_KINDS = ("bf16", "f16", "f32", "q8")  # types of encoders, the first that is there is taken
_NO_NAMES = (ENCODER, "model", "0", *_KINDS)  # words that are no part of a model's name
IMATRIX = "imatrix"  # at the beginning of the name of a file that is no model


def is_gguf(path: PurePath) -> bool:
    """Whether a path is called a GGUF file."""
    return path.name.endswith(SUFFIX)


def parts(path: Path) -> list[Path]:
    """All files of the model to which a file belongs, in order. Raises ModelNotFound."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    num_parts = int(match[3])
    if not 1 <= num_parts <= MAX_PARTS:
        raise ModelNotFound(f"{path} is said to be one of {num_parts} files")
    found = [
        path.with_name(f"{match[1]}-{number:05}-of-{num_parts:05}{SUFFIX}")
        for number in range(1, num_parts + 1)
    ]
    missing = [one.name for one in found if not one.exists()]
    if missing:
        raise ModelNotFound(
            f"{path.parent} lacks {len(missing)} of the {num_parts} files of {match[1]}: "
            f"{', '.join(missing[:5])}"
        )
    return found


def stem(path: PurePath) -> str:
    """The name of a model: that of its file, without ending and number of the part."""
    match = _PART.fullmatch(path.name)
    if match is not None:
        return match[1]
    return path.name.removesuffix(SUFFIX)


def first_of_each(paths: Iterable[P]) -> list[P]:
    """The first file of each model among these files."""
    first: dict[str, P] = {}
    for path in sorted(paths):
        name = path.name.lower()
        if ENCODER not in name and not name.startswith(IMATRIX):
            first.setdefault(stem(path), path)
    return list(first.values())


def only_model(folder: Path, kind: str = "") -> Path:
    """The first file of the only model in a folder. `kind`: counts only models whose names end with
    this type ("Q4_K_M"). Raises ModelNotFound, naming the models, if there is none or more than
    one."""
    pattern = f"*{SUFFIX}"
    found = first_of_each(folder.rglob(pattern) if kind else folder.glob(pattern))
    if kind:
        found = [path for path in found if is_of_kind(stem(path), kind)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found[:8])
    if found:
        raise ModelNotFound(f"{folder} has {len(found)} models, name one of them: {names}")
    what = f"GGUF file of type {kind}" if kind else "GGUF file"
    raise ModelNotFound(f"{folder} has no {what}")


def is_of_kind(name: str, kind: str) -> bool:
    """Whether a model's name ends with this type of weights, in upper or lower case."""
    ending = re.compile(rf"(^|[-._/]){re.escape(kind)}$", re.IGNORECASE)
    return ending.search(name) is not None


def encoder_beside(path: P, others: Iterable[P]) -> P | None:
    """The file with the encoder of a model among these files, by its name: "mmproj", the model's
    name without the type of its weights, and its own type. None: there is none."""
    name = stem(path).lower()
    found = []
    for other in others:
        if not is_gguf(other) or ENCODER not in other.name.lower():
            continue
        words = _WORD.findall(stem(other).lower())
        kind = next((rank for rank, kind in enumerate(_KINDS) if kind in words), len(_KINDS))
        rest = [word for word in words if word not in _NO_NAMES]
        if _WORD.findall(name)[: len(rest)] == rest:
            found.append((-len(rest), kind, other.name, other))
    return min(found)[-1] if found else None

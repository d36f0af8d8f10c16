"""Finds the files of a model from its name: a folder, a GGUF file, an id on the Hugging Face hub,
or a model that weft knows by name (`known.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.config.options import did_you_mean
from weft.weights import hub
from weft.weights.gguf import files as gguf_files
from weft.weights.known import default_model, known_model, known_names

# Files that are downloaded from the hub: neither code nor pickles.
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
HUB_FILES = ("*.safetensors", *DESCRIPTIONS)
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# Copies of the weights in formats of their makers' own programs.
COPIES = ("consolidated*", "original/*", "metal/*")


def local_path(model: str, revision: str = "") -> Path:
    """The folder of a model with safetensors, or the first GGUF file of a model. Downloads a model
    on the hub first. Raises `ModelNotFound`."""
    model = model or default_model()
    path = Path(model).expanduser()
    if path.name.endswith(gguf_files.ENDING) and path.exists() and not path.is_dir():
        return path
    if not path.exists():
        known = known_model(model)
        if known is not None:
            return known
    name, _, kind = model.partition(":")
    if kind and not path.exists() and _is_id(name):
        return _download_gguf(name, kind, revision)
    if _is_id(model) and model.lower().endswith("-gguf") and not path.exists():
        raise ModelNotFound(
            f"{model} has GGUF files of several types; name one of them, as {model}:Q4_K_M"
        )
    folder = local_folder(model, revision)
    has_gguf = next(folder.glob(f"*{gguf_files.ENDING}"), None) is not None
    has_others = next(folder.glob("*.safetensors"), None) is not None
    if has_gguf and not has_others:
        return gguf_files.only_model(folder)
    return folder


def local_folder(model: str, revision: str = "", patterns: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a model. Downloads the files of a model on the hub that match `patterns` first.
    Raises `ModelNotFound`."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFound(
            f"{model} is a file; a model is a folder with config.json and *.safetensors, "
            "or a GGUF file"
        )
    if not _is_id(model):
        raise ModelNotFound(_no_such(model))
    return _download(model, revision, patterns)


def _no_such(model: str) -> str:
    """The error for a name that is neither here nor can be an id on the hub."""
    name, _, kind = model.partition(":")
    path = Path(name).expanduser()
    if name.endswith(gguf_files.ENDING):
        message = f"there is no file {model}"
        if path.is_file():
            return f"{message}; a file is named without a type: {name}"
    elif kind and "/" not in name:
        message = (
            f"there is no model {model}; a type of weights is named for a repository on the "
            f"Hugging Face hub, as ORG/MODEL-GGUF:{kind}"
        )
    else:
        message = f"there is no folder {model}"
    near = did_you_mean(path.name, _beside(path))
    if "/" in model:
        return message + near
    names = known_names()
    near = near or did_you_mean(name.lower(), [known.lower() for known in names])
    return (
        f"{message}{near}; names without a folder are ORG/MODEL on the Hugging Face hub, and "
        f"{', '.join(names)}"
    )


def _beside(path: Path) -> list[str]:
    """The names in the folder of a path; empty if there is no such folder."""
    try:
        return [one.name for one in path.parent.iterdir()]
    except OSError:
        return []


def _is_id(model: str) -> bool:
    """Whether `model` can be an id on the hub."""
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        return False
    return not model.partition(":")[0].endswith((gguf_files.ENDING, ".safetensors"))


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model: the safetensors files of its index, else the file with the usual
    name, else all safetensors files; without any, the GGUF files of one model. Raises
    `ModelNotFound`."""
    if (folder / INDEX).exists():
        try:
            shards = set(
                json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise BadCheckpoint(f"{folder / INDEX} is damaged: {exc!r}") from exc
        files = [folder / Path(str(name)).name for name in sorted(shards)]
    elif (folder / WHOLE).exists():
        # Other files may hold the same weights under other names (consolidated.safetensors).
        files = [folder / WHOLE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob(f"*{gguf_files.ENDING}")):
        return gguf_files.parts(gguf_files.only_model(folder))
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ModelNotFound(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files: "
            f"{', '.join(missing[:5])}"
        )
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = ", only pickled ones, which can run code and are never read" if pickled else ""
        raise ModelNotFound(f"{folder} has no weights in *.safetensors{hint}")
    return files


def _download_gguf(model: str, kind: str, revision: str) -> Path:
    """Download the GGUF files with weights of a type ("Q4_K_M"), and the files that describe the
    model. Returns the first GGUF file."""
    patterns = list(DESCRIPTIONS)
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    patterns.extend(f"*{name}*{gguf_files.ENDING}" for name in spellings)
    folder = _download(model, revision, patterns)
    return gguf_files.only_model(folder, kind)


def _download(model: str, revision: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    unreachable = ""
    if not hub.is_offline():
        unreachable = hub.why_unreachable(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                model,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=list(COPIES),
                local_files_only=bool(unreachable) or hub.is_offline(),
            )
        )
    except LocalEntryNotFoundError as exc:
        reason = _first_line(exc)
        if unreachable:
            reason = f"there is no connection ({unreachable})"
        elif hub.is_offline():
            reason = "HF_HUB_OFFLINE is set"
        raise ModelNotFound(
            f"{model} is not a folder here, is not in the cache of the hub "
            f"({constants.HF_HUB_CACHE}), and could not be fetched from the hub: {reason}"
        ) from exc
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as exc:
        raise ModelNotFound(
            f"{model} is not a folder here, and could not be fetched from the hub: "
            f"{_first_line(exc)}"
        ) from exc


def _first_line(exc: Exception) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)

"""Finds the files of a model from its name: a folder, a GGUF file, an id on the Hugging Face hub,
or a model that weft knows by name (`known.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.config.options import did_you_mean
from weft.observe.log import EventLog
from weft.weights.gguf import files as gguf_files
from weft.weights.known import default_model, known_model, known_names
from weft.weights.own import models_folder, own_model
from weft.weights.pull.choose import HUB_FILES
from weft.weights.pull.listing import HubUnreachable, PullError
from weft.weights.pull.names import SITES, HubName, hub_name, is_plain
from weft.weights.pull.progress import log_watcher
from weft.weights.pull.pull import pull, pull_files, repo_folder

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

log = EventLog("pull")


def local_path(model: str, revision: str = "") -> Path:
    """The folder of a model with safetensors, or the first GGUF file of a model. Downloads a model
    on the hub first. Raises `ModelNotFound`."""
    model = model or default_model()
    path = Path(model).expanduser()
    if gguf_files.is_gguf(path) and path.exists() and not path.is_dir():
        return path
    if not path.exists():
        known = known_model(model)
        if known is not None:
            return known
        if is_plain(model):
            own = own_model(model, models_folder())
            if own is not None:
                return model_in(own) if own.is_dir() else own
        if _is_id(model):
            return _on_hub(hub_name(model), revision)
    return model_in(local_folder(model, revision))


def model_in(folder: Path, name: HubName | None = None) -> Path:
    """The model in a folder: the folder itself, or the first GGUF file of a model. `name` chooses
    one of several. Raises ModelNotFound."""
    if name is not None and name.file:
        return gguf_files.parts(folder / name.file)[0]
    if name is not None and name.kind:
        return gguf_files.only_model(folder, name.kind)
    has_gguf = next(folder.glob("*.gguf"), None) is not None
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
    name = hub_name(model)
    try:
        return pull_files(name.repo, revision, patterns, log_watcher())
    except PullError as exc:
        return _instead(name, revision, exc)


def _no_such(model: str) -> str:
    """The error for a name that is neither here nor can be an id on the hub."""
    name, _, kind = model.partition(":")
    path = Path(name).expanduser()
    if name.endswith(gguf_files.SUFFIX):
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
    """Whether `model` can be an id on the hub, or a GGUF file there."""
    if model.startswith(("/", ".", "~")):
        return False
    name = model
    for site in SITES:
        name = name.removeprefix(site)
    if name.count("/") > 1 and name.endswith(gguf_files.SUFFIX):
        # Else a path to a file that is not there.
        return not Path(name.partition("/")[0]).exists()
    if name.count("/") != 1:
        return False
    return not name.partition(":")[0].endswith((gguf_files.SUFFIX, ".safetensors"))


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
    if not files and any(folder.glob("*.gguf")):
        parts = gguf_files.parts(gguf_files.only_model(folder))
        encoder = folder / (gguf_files.ENCODER + gguf_files.SUFFIX)
        return [*parts, encoder] if encoder.exists() else parts
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


def _on_hub(name: HubName, revision: str) -> Path:
    """The model with this name; what is in the cache does if the hub does not answer. Raises
    ModelNotFound."""
    try:
        pulled = pull(name, revision, log_watcher())
    except PullError as exc:
        return model_in(_instead(name, revision, exc), name)
    return model_in(pulled.folder, pulled.name)


def _instead(name: HubName, revision: str, exc: PullError) -> Path:
    """The snapshot in the cache, because the hub did not send the files. Raises ModelNotFound."""
    folder = snapshot_here(name.repo, revision)
    if folder is None:
        raise ModelNotFound(
            f"{name} is not a folder here, is not in the cache of the hub "
            f"({repo_folder(name.repo).parent}), and could not be fetched from the hub: {exc}"
        ) from exc
    if not isinstance(exc, HubUnreachable):
        log.warning("model_from_cache", model=name, reason=exc)
    return folder


def snapshot_here(repo: str, revision: str = "") -> Path | None:
    """The files of a repository in the cache of the hub; None if there are none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
    except (OSError, ValueError, HFValidationError):
        return None

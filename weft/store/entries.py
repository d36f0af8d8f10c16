"""The models on this machine, from three sources.

    the cache of the hub (HF_HOME)     org/name, org/name:Q4_K_M     weft pull puts models there
    the user's own folder              my-model                      weft cp puts models there
    installed packages                 SmolLM2-135M-Instruct         weft-nano is bundled

It reads names and sizes of files, and none of their content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from weft.config.model import ModelNotFound
from weft.config.options import did_you_mean
from weft.weights.gguf import files as gguf_files
from weft.weights.known import known_model, known_names
from weft.weights.own import own_model, own_models
from weft.weights.pull.choose import kind_of
from weft.weights.pull.names import HubName, hub_name, require_printable

Source = Literal["hub", "folder", "package"]
INCOMPLETE = "*.incomplete"
TRIES = 100  # while others remove models


class Entry(NamedTuple):
    """One model."""

    name: str
    source: Source
    path: Path  # its folder, or its first GGUF file
    files: tuple[Path, ...]  # that belong to it alone or with others
    num_bytes: int
    modified_at: float  # seconds since 1970
    is_complete: bool = True  # False: its pull was ended

    @property
    def is_gguf(self) -> bool:
        return gguf_files.is_gguf(self.path)


def entries(hub_cache: Path, models_dir: Path) -> list[Entry]:
    """All models of this machine, by name. Looks again where another process removes files
    meanwhile. Raises FileNotFoundError if it does so for ever."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError):
            return _entries(hub_cache, models_dir)
    return _entries(hub_cache, models_dir)


def _entries(hub_cache: Path, models_dir: Path) -> list[Entry]:
    found = [*_of_hub(hub_cache), *_of_folder(models_dir), *_of_packages()]
    return sorted(found, key=lambda one: one.name.lower())


def find(name: str, hub_cache: Path, models_dir: Path) -> Entry:
    """The model with this name. Raises ModelNotFound."""
    require_printable(name)
    found = entries(hub_cache, models_dir)
    for one in found:
        if one.name == name:
            return one
    wanted = _normalized(name)
    same = [one for one in found if _normalized(one.name) == wanted]
    # ORG/NAME alone is the only type of a repository that is here.
    same = same or [one for one in found if one.name.partition(":")[0].lower() == wanted]
    if len(same) == 1:
        return same[0]
    names = [one.name for one in found]
    if same:
        raise ModelNotFound(f"{name} are several models: {', '.join(one.name for one in same)}")
    own_model(name, models_dir)  # raises an error for a link out of the folder
    near = did_you_mean(name, names)
    raise ModelNotFound(f"there is no model {name!r} here{near}; weft list shows all")


def _normalized(name: str) -> str:
    if "/" in name:
        try:
            return str(hub_name(name)).lower()
        except ModelNotFound:
            return name.lower()
    return name.lower()


def _of_hub(cache: Path) -> Iterator[Entry]:
    for folder in sorted(cache.glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(folder)
        found = [] if snapshot is None else list(_of_snapshot(repo, snapshot))
        yield from found
        parts = [*(folder / "blobs").glob(INCOMPLETE)]
        if parts and not found:
            yield _entry(repo, "hub", folder, parts, is_complete=False)


def _snapshot(folder: Path) -> Path | None:
    """The files of the newest version of a repository; None: there are none."""
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    main = folder / "refs" / "main"
    if main.is_file():
        named = folder / "snapshots" / main.read_text().strip()
        if named in snapshots:
            return named
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _of_snapshot(repo: str, snapshot: Path) -> Iterator[Entry]:
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    others = [path for path in files if not gguf_files.is_gguf(path)]
    if any(path.suffix == ".safetensors" for path in others):
        yield _entry(repo, "hub", snapshot, others)
    for path in gguf_files.first_of_each(path for path in files if path not in others):
        kind = kind_of(gguf_files.stem(path))
        name = HubName(repo, kind) if kind else HubName(repo, "", str(path.relative_to(snapshot)))
        yield _entry(str(name), "hub", path, _parts(path))


def _of_folder(folder: Path) -> Iterator[Entry]:
    for name, path in own_models(folder):
        files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else _parts(path)
        yield _entry(name, "folder", path, files)


def _of_packages() -> Iterator[Entry]:
    for name in known_names():
        try:
            path = known_model(name)
        except ModelNotFound:
            continue
        assert path is not None
        files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
        yield _entry(name, "package", path, files)


def _entry(
    name: str, source: Source, path: Path, files: Sequence[Path], *, is_complete: bool = True
) -> Entry:
    statuses = [file.stat() for file in files]
    num_bytes = sum(status.st_size for status in statuses)
    modified_at = max((status.st_mtime for status in statuses), default=0.0)
    return Entry(name, source, path, tuple(files), num_bytes, modified_at, is_complete)


def _parts(path: Path) -> list[Path]:
    try:
        return gguf_files.parts(path)
    except ModelNotFound:
        return [path]

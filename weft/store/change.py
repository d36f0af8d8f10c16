"""Removes models from this machine, and copies them under another name.

Only what lies below the cache of the hub or the user's own folder is touched, and a link is removed
itself, never what it leads to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weft.config.amounts import size
from weft.config.model import ModelNotFound
from weft.store.entries import Entry
from weft.weights.gguf import files as gguf_files
from weft.weights.in_use import is_in_use
from weft.weights.known import known_names
from weft.weights.own import own_model
from weft.weights.pull.names import BadName, is_plain, require_printable

WEIGHTS = (".gguf", ".safetensors")
TRIES = 1_000  # as many as there may be files that two remove in turns


class Removal(NamedTuple):
    """What removing a model takes away."""

    entry: Entry
    paths: tuple[Path, ...]  # files, links and folders
    num_bytes: int  # that the disk gets back

    def do(self) -> None:
        """Remove them, together with others who remove them at the same time. Raises OSError."""
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                _remove_folder(path)
            else:
                path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> None:
    for number in range(TRIES):
        try:
            shutil.rmtree(path)
            return
        except FileNotFoundError:  # another process has removed something in it
            if not path.exists():
                return
            if number == TRIES - 1:
                raise


def removal(entry: Entry, hub_cache: Path, models_dir: Path) -> Removal:
    """What would be removed. Raises ModelNotFound for a model of a package, and for one that a
    process computes with."""
    if entry.source == "package":
        raise ModelNotFound(
            f"{entry.name} belongs to an installed package, perhaps to weft itself: it goes with "
            "that (pip uninstall)"
        )
    if is_in_use(entry.files):
        raise ModelNotFound(
            f"{entry.name} is in use, so it is not removed: unload it (weft ctl models unload), or "
            "stop the program that has loaded it"
        )
    if entry.source == "folder":
        assert entry.path.parent == models_dir
        paths = [entry.path] if entry.path.is_dir() else list(entry.files)
        return _removal(entry, paths, entry.files)
    parts = entry.path.relative_to(hub_cache).parts
    repo = hub_cache / parts[0]
    # Files that describe a model may belong to others, too.
    links = _links_to(repo, [path for path in entry.files if path.name.endswith(WEIGHTS)])
    left = [path for path in _files_in(repo) if path.name.endswith(WEIGHTS) and path not in links]
    models = gguf_files.first_of_each(left)  # without encoders, which are of use to a model only
    if not links or not models:
        locks = hub_cache / ".locks" / repo.name
        everything = [path for path in repo.rglob("*") if not path.is_dir()]
        paths = [repo, locks] if locks.is_dir() else [repo]
        return _removal(entry, paths, everything)
    kept = {path.resolve() for path in left}
    blobs = {path.resolve() for path in links} - kept
    blobs = {path for path in blobs if path.is_relative_to(repo.resolve())}
    return _removal(entry, [*links, *sorted(blobs - set(links))], blobs)


def copy(entry: Entry, name: str, models_dir: Path) -> Path:
    """Make a model with this name in the user's own folder, which stays when the other is removed.
    Files are shared with it where both are in one file system. Raises ModelNotFound and OSError."""
    require_printable(name)
    if not is_plain(name) or gguf_files.is_gguf(Path(name)):
        raise BadName(
            f"{name!r} cannot be the name of a copy: letters, digits, '.', '_' and '-' are allowed"
        )
    known = name.lower() in (one.lower() for one in known_names())
    if known or own_model(name, models_dir) is not None or (models_dir / name).exists():
        raise ModelNotFound(f"there is a model {name} already; weft rm {name} removes it")
    base = entry.path.parent if entry.is_gguf else entry.path
    models_dir.mkdir(parents=True, exist_ok=True)
    made = models_dir / f".{name}.{os.getpid()}"
    try:
        for path in entry.files:
            target = made / (path.name if entry.is_gguf else path.relative_to(base))
            target.parent.mkdir(parents=True, exist_ok=True)
            _share(path.resolve(), target)
        made.rename(models_dir / name)
    finally:
        if made.exists():
            shutil.rmtree(made, ignore_errors=True)
    return models_dir / name


def _share(path: Path, target: Path) -> None:
    """The same file under another name; a copy where a file system has no second names."""
    with suppress(OSError):
        os.link(path, target)
        return
    free = shutil.disk_usage(target.parent).free
    if path.stat().st_size > free:
        raise ModelNotFound(
            f"{path} takes {size(path.stat().st_size)}, and the disk of {target.parent} has "
            f"{size(free)}"
        )
    shutil.copyfile(path, target)


def _removal(entry: Entry, paths: Sequence[Path], files: Iterable[Path]) -> Removal:
    """`files`: those that go, without links; others may share their bytes."""
    num_bytes = 0
    for path in files:
        with suppress(OSError):
            status = path.lstat()
            if not path.is_symlink() and status.st_nlink == 1:
                num_bytes += status.st_size
    return Removal(entry, tuple(paths), num_bytes)


def _links_to(repo: Path, files: Sequence[Path]) -> list[Path]:
    """The names of these files in all versions of a repository."""
    blobs = {file.resolve() for file in files}
    return [path for path in _files_in(repo) if path.resolve() in blobs]


def _files_in(repo: Path) -> list[Path]:
    return [path for path in (repo / "snapshots").rglob("*") if not path.is_dir()]

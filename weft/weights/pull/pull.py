"""Pulls a model: lists its repository, chooses files, fetches those that are missing, and gives
them their names in the cache of the hub.

    models--org--name/
        blobs/<etag>                     the files, by their content
        snapshots/<commit>/<path> ->     the files of a version, by their names
        refs/main                        the commit of a branch

It is the layout of the library `huggingface_hub`, so each finds what the other has fetched.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from weft.config.amounts import size
from weft.config.machine import probe
from weft.weights import hub
from weft.weights.pull.choose import chosen_files, matching
from weft.weights.pull.listing import HubFile, HubUnreachable, Listing, PullError, list_files
from weft.weights.pull.names import HubName, is_plain
from weft.weights.pull.transfer import DiskError, Download, PullStopped, Watcher, fetch

NUM_AT_ONCE = 4  # files
JOIN_S = 0.2
SPARE_BYTES = 200_000_000  # of the disk, which stay free
MAIN = "main"


class Pulled(NamedTuple):
    """A model that is complete in the cache."""

    name: HubName  # with the type that was chosen
    folder: Path  # the snapshot
    files: tuple[HubFile, ...]
    commit: str


class PullWatcher(Watcher):
    """A `Watcher` that also gets to know the files before the first one comes."""

    def begins(self, name: HubName, files: Sequence[HubFile]) -> None:
        """These files make the model; some of them may be here already."""


def pull(name: HubName, revision: str = "", watcher: PullWatcher | None = None) -> Pulled:
    """Pull a model of the hub. Raises PullError; KeyboardInterrupt leaves what has come, and the
    next call goes on."""
    watcher = watcher or PullWatcher()
    listing = _listed(name.repo, revision, watcher)
    blobs = repo_folder(name.repo) / "blobs"
    here = {file.etag for file in listing.files if (blobs / file.etag).exists()}
    named, files = chosen_files(listing, name, _free_bytes(), here)
    return _pull(listing, named, files, revision, watcher)


def pull_files(
    repo: str, revision: str, patterns: Sequence[str], watcher: PullWatcher | None = None
) -> Path:
    """Pull the files of a repository that match. Returns the snapshot. Raises PullError."""
    watcher = watcher or PullWatcher()
    listing = _listed(repo, revision, watcher)
    files = matching(listing, patterns)
    return _pull(listing, HubName(repo), files, revision, watcher).folder


def repo_folder(repo: str) -> Path:
    """The folder of a repository in the cache of the hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _listed(repo: str, revision: str, watcher: PullWatcher) -> Listing:
    from huggingface_hub import constants

    if revision and not all(map(is_plain, revision.split("/"))):
        raise PullError(f"{revision[:100]!r} is no name of a branch, a tag or a commit")
    if hub.is_offline():
        raise HubUnreachable(
            "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub is not asked"
        )
    unreachable = hub.why_unreachable(constants.ENDPOINT)
    if unreachable:
        raise HubUnreachable(f"there is no connection to the hub ({unreachable})")
    return list_files(repo, revision, watcher.note)


def _pull(
    listing: Listing,
    name: HubName,
    files: Sequence[HubFile],
    revision: str,
    watcher: PullWatcher,
) -> Pulled:
    if not files:
        raise PullError(f"{listing.repo} has no files that weft reads")
    folder = repo_folder(listing.repo)
    parts = [_part(folder, listing, file) for file in files]
    watcher.begins(name, files)
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        _require_room(parts)
        _fetch_all(parts, watcher)
        snapshot = folder / "snapshots" / listing.commit
        for part in parts:
            _link(part.blob, snapshot / part.file.path)
        if revision != listing.commit:
            _write_ref(folder / "refs", revision or MAIN, listing.commit)
    except (OSError, DiskError) as exc:
        raise PullError(_of_disk(exc, folder)) from exc
    return Pulled(name, snapshot, tuple(files), listing.commit)


def _part(folder: Path, listing: Listing, file: HubFile) -> Download:
    from huggingface_hub import constants

    path = f"{listing.repo}/resolve/{listing.commit}/{quote(file.path)}"
    return Download(
        repo=listing.repo,
        file=file,
        url=f"{constants.ENDPOINT}/{path}",
        blob=folder / "blobs" / file.etag,
        lock=folder.parent / ".locks" / folder.name / f"{file.etag}.lock",
    )


def _fetch_all(parts: Sequence[Download], watcher: PullWatcher) -> None:
    """Fetch some files at a time, the largest first. Raises the first error."""
    headers = _headers()
    waiting = sorted({part.blob: part for part in parts}.values(), key=_size_of)
    failed: list[BaseException] = []

    def work() -> None:
        while waiting and not watcher.stopped.is_set():
            try:
                fetch(waiting.pop(), headers, watcher)
            except IndexError:  # another thread was faster
                return
            except BaseException as exc:
                if not isinstance(exc, PullStopped):
                    failed.append(exc)
                watcher.stopped.set()

    threads = [
        # The program ends without them: one that waits for a server would keep it.
        threading.Thread(target=work, name="weft-pull", daemon=True)
        for _ in range(min(NUM_AT_ONCE, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(JOIN_S)
    except BaseException:  # Ctrl-C
        watcher.stopped.set()
        raise
    if failed:
        raise failed[0]
    if watcher.stopped.is_set():
        raise PullError("it was stopped; what has come is kept")


def _size_of(part: Download) -> int:
    return part.file.num_bytes


def _headers() -> dict[str, str]:
    from huggingface_hub import get_token

    from weft.version import __version__

    headers = {"User-Agent": f"weft/{__version__}"}
    token = get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _require_room(parts: Sequence[Download]) -> None:
    """Raise PullError if the disk has too little room for what is missing."""
    missing = 0
    for blob, part in {part.blob: part for part in parts}.items():
        if blob.exists():
            continue
        have = 0
        with suppress(OSError):
            have = part.incomplete.stat().st_size
        missing += max(part.file.num_bytes - have, 0)
    free = shutil.disk_usage(parts[0].blob.parent).free
    if missing and missing + SPARE_BYTES > free:
        raise PullError(
            f"{size(missing)} are to come, and the disk of {parts[0].blob.parents[1]} has "
            f"{size(free)}; weft rm makes room, HF_HOME names another disk"
        )


def _of_disk(exc: OSError | DiskError, folder: Path) -> str:
    if exc.errno == errno.ENOSPC:
        return (
            f"the disk of {folder} is full; what has come is kept (weft rm makes room, HF_HOME "
            "names another disk)"
        )
    return f"{folder} cannot be written: {exc}"


def _link(blob: Path, path: Path) -> None:
    """Give a blob its name in a snapshot."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        beside.unlink()
    try:
        beside.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # a file system without links
        shutil.copyfile(blob, beside)
    beside.replace(path)


def _write_ref(refs: Path, revision: str, commit: str) -> None:
    path = refs / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(commit)
    beside.replace(path)


def _free_bytes() -> int:
    """Memory for a model: that of the GPU, if there is one."""
    machine = probe()
    if machine.gpus:
        return machine.gpus[0].free_bytes
    return machine.free_bytes

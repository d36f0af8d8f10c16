"""The folder of the weights cache: finds, makes and removes its files.

    qwen3-0.6b-5f3c..e1.weights        ready; its time of change is when it was last used
    qwen3-0.6b-5f3c..e1.lock           held by the process that makes it
    .qwen3-0.6b-5f3c..e1.4711.tmp      being written; renamed when it is on the disk

A file that a process maps is locked (`file.open_file`), so nobody removes it. Several processes may
use one folder at once. What cannot be used or written is left out with a line in the log: the cache
saves time, and nothing depends on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.amounts import size
from weft.json_types import JsonObject
from weft.observe.log import EventLog
from weft.weights.cache.file import (
    Bytes,
    Damaged,
    Mapped,
    is_in_use,
    map_file,
    open_file,
    read_description,
    write,
)

ENDING = ".weights"
WAIT_S = 900.0  # for another process that makes the same file
POLL_S = 0.05
FREE_PART = 0.05  # of a disk, which the cache leaves free
OLD_S = 60.0  # age of an unlocked temporary file that nobody writes any more

log = EventLog("engine")


class CachedFile(NamedTuple):
    """A file in the folder, for users."""

    name: str
    model: str
    num_bytes: int
    used_at: float  # seconds since 1970
    is_used: bool  # whether a process maps it now


class WeightsKey(NamedTuple):
    """What determines the bytes of packed weights. Equal facts mean equal bytes."""

    model: str  # name, for users
    facts: JsonObject

    @property
    def file_name(self) -> str:
        named = re.sub(r"[^a-z0-9.]+", "-", self.model.lower()).strip("-.")[:60] or "model"
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        return f"{named}-{digest[:32]}{ENDING}"


def default_folder() -> Path:
    base = os.environ.get("WEFT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft" / "weights"


class WeightsCache:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def find(self, key: WeightsKey) -> Mapped | None:
        """The weights of this key, mapped; None if there are none that can be used."""
        path = self.folder / key.file_name
        try:
            file = open_file(path)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as exc:
            self._pass_over(path, exc)
            return None
        try:
            mapped = map_file(file)
            if mapped.description["facts"] != key.facts:
                raise Damaged("it belongs to other weights")
            with suppress(OSError):  # a folder that this process may not change
                os.utime(path)
            return mapped
        except (OSError, Damaged, KeyError) as exc:
            self._pass_over(path, exc)
            return None
        finally:
            os.close(file)

    @contextmanager
    def making(self, key: WeightsKey) -> Iterator[bool]:
        """While the block runs, no other process makes the weights of this key. Waits for one that
        does. False: this one should not store them, because it cannot lock the folder or has
        waited for too long."""
        path = (self.folder / key.file_name).with_suffix(".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = _locked(path)
        except OSError as exc:
            log.warning("weights_cache_unusable", folder=self.folder, reason=_reason(exc))
            lock = -1
        try:
            yield lock >= 0
        finally:
            if lock >= 0:
                with suppress(OSError):
                    path.unlink()
                os.close(lock)

    def store(self, key: WeightsKey, layout: list[Any], blocks: Sequence[Bytes]) -> bool:
        """Write the weights of this key. Removes the files that were not used for longest, if there
        is too little room. False: they are not stored, and the log says why."""
        num_bytes = sum(len(block) for block in blocks)
        why = self._why_no_room(num_bytes)
        if why:
            log.warning("weights_not_cached", model=key.model, reason=why)
            return False
        path = self.folder / key.file_name
        made = self.folder / f".{path.name}.{os.getpid()}.tmp"
        description = {"model": key.model, "facts": key.facts, "layout": layout}
        try:
            file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Others remove a temporary file that nobody has locked.
                fcntl.flock(file, fcntl.LOCK_EX)
                write(file, description, blocks)
                made.rename(path)
                _sync_folder(self.folder)
            finally:
                os.close(file)
        except OSError as exc:
            with suppress(OSError):
                made.unlink()
            log.warning("weights_not_cached", model=key.model, reason=_reason(exc))
            return False
        return True

    def files(self) -> list[CachedFile]:
        """The files, the last used first."""
        found = []
        for path, status in self._stored():
            model = ""
            is_used = False
            try:
                file = open_file(path)
            except (OSError, Damaged):
                continue
            try:
                with suppress(OSError, Damaged):
                    model = str(read_description(file)["model"])
                is_used = is_in_use(file)
            finally:
                os.close(file)
            found.append(CachedFile(path.name, model, status.st_size, status.st_mtime, is_used))
        return found[::-1]

    def clear(self) -> tuple[int, int]:
        """Remove the files that no process uses. Returns the bytes that were freed, and the number
        of files that stay."""
        freed = 0
        num_left = 0
        for path, status in self._stored():
            if _removed(path):
                freed += status.st_size
            else:
                num_left += 1
        freed += self._remove_leftovers()
        return freed, num_left

    def _why_no_room(self, num_bytes: int) -> str:
        """Make room for a new file of this size. Returns why there is none; "" if there is."""
        if num_bytes > self._max_bytes:
            return (
                f"they take {size(num_bytes)}, and the cache {size(self._max_bytes)} "
                "(--weights-cache-gb)"
            )
        self._remove_leftovers()
        stored = self._stored()
        total = sum(status.st_size for _, status in stored)
        for path, status in stored:
            if total + num_bytes <= self._max_bytes and self._lacks(num_bytes) <= 0:
                return ""
            if _removed(path):
                total -= status.st_size
                log.info("weights_cache_evicted", file=path.name)
        if total + num_bytes > self._max_bytes:
            return f"other models, which are in use, take {size(total)} of the cache"
        lacking = self._lacks(num_bytes)
        if lacking > 0:
            return f"the disk of {self.folder} lacks {size(lacking)}"
        return ""

    def _lacks(self, num_bytes: int) -> float:
        """Bytes that the disk lacks to take a file of this size; 0 or less: it has room."""
        disk = shutil.disk_usage(self.folder)
        return num_bytes + FREE_PART * disk.total - disk.free

    def _stored(self) -> list[tuple[Path, os.stat_result]]:
        """The files and their status, the least recently used first."""
        found = []
        with suppress(OSError):
            for path in self.folder.glob(f"*{ENDING}"):
                with suppress(OSError):
                    found.append((path, path.lstat()))
        return sorted(found, key=lambda one: (one[1].st_mtime_ns, one[0].name))

    def _remove_leftovers(self) -> int:
        """Remove temporary files of processes that have ended. Returns their bytes."""
        freed = 0
        for path in self.folder.glob(f".*{ENDING}.*.tmp"):
            with suppress(OSError):
                status = path.lstat()
                # A process that has just made the file may not have locked it yet.
                if time.time() - status.st_mtime > OLD_S and _removed(path):
                    freed += status.st_size
        return freed

    def _pass_over(self, path: Path, exc: Exception) -> None:
        log.warning("weights_cache_file_not_used", file=path.name, reason=_reason(exc))


def _removed(path: Path) -> bool:
    """Remove a file unless a process uses it. Whether it was removed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if is_in_use(file):
            return False
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    """Lock a file that is made if necessary. Returns its descriptor; -1: another process has kept
    the lock for too long. Raises OSError."""
    until = time.monotonic() + WAIT_S
    is_told = False
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() > until:
                return -1
            if not is_told:
                log.info("weights_are_made_by_another_process", file=path.name)
            is_told = True
            time.sleep(POLL_S)
            continue
        # Its last holder has removed it, if it is not this file any more.
        with suppress(OSError):
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _reason(exc: Exception) -> str:
    return getattr(exc, "strerror", None) or str(exc)


def cache_at(folder: str, max_gb: float) -> WeightsCache:
    """The cache in this folder; "": in the default one."""
    path = Path(folder).expanduser().absolute() if folder else default_folder()
    return WeightsCache(path, int(max_gb * 1e9))

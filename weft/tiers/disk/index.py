"""The index of stored blocks, in the order of their last use: all blocks of a folder, including
those of other models, which only use space.

    DIR / first 16 digits of the fingerprint / first 2 of the key / key.kv

The last use of a block is the modification time of its file. So the order outlives the process, and
servers that share a folder share the order.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weft.tiers.disk.files import SUFFIX, TEMPORARY

TOUCH_S = 60.0  # minimum time between two updates of a file's time
ABANDONED_S = 600.0  # a temporary file of this age was abandoned: its process was killed
_MODEL = re.compile(r"[0-9a-f]{16}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))


class StoredBlock(NamedTuple):
    model: str  # folder of the model
    num_bytes: int
    noted_s: float  # the last use noted in the file, Unix time
    used_s: float  # the last use known here, Unix time


class FoundBlock(NamedTuple):
    """A file that a scan has found."""

    used_s: float
    key: bytes
    block: StoredBlock


class BlockIndex:
    """The index of one folder. Any thread may call it; only `scan` and `drop_all` touch files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, StoredBlock] = OrderedDict()  # least recently used first
        self._counts: Counter[str] = Counter()  # blocks by model
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def num_of(self, model: str) -> int:
        """Number of stored blocks of one model."""
        return self._counts[model]

    def path(self, model: str, key: bytes) -> Path:
        name = key.hex()
        return self.folder / model / name[:2] / (name + SUFFIX)

    def add(self, model: str, key: bytes, num_bytes: int) -> None:
        """Add a block that has been written."""
        with self._lock:
            now = time.time()
            self._put(key, StoredBlock(model, num_bytes, now, now))

    def use(self, keys: Sequence[bytes], new: Container[bytes] = ()) -> list[Path]:
        """Mark blocks of a sequence as used: its beginning last, because the rest cannot be found
        without it. Returns the files whose times must be updated, in the order of use: at most
        every `TOUCH_S`, except for blocks that are `new`."""
        files: list[Path] = []
        with self._lock:
            now = time.time()
            for key in reversed(keys):
                block = self._blocks.get(key)
                if block is None:
                    continue
                self._blocks.move_to_end(key)
                block = block._replace(used_s=now)
                if key in new or now - block.noted_s >= TOUCH_S:
                    block = block._replace(noted_s=now)
                    files.append(self.path(block.model, key))
                self._blocks[key] = block
        return files

    def drop(self, key: bytes) -> Path | None:
        """Remove a block from the index. Returns its file, if it was known."""
        with self._lock:
            block = self._take(key)
        return None if block is None else self.path(block.model, key)

    def oldest(self) -> bytes | None:
        """The least recently used block."""
        with self._lock:
            return next(iter(self._blocks), None)

    def drop_all(self) -> list[Path]:
        """Remove all blocks from the index. Returns their files."""
        with self._lock:
            files = [self.path(block.model, key) for key, block in self._blocks.items()]
            self._blocks.clear()
            self._counts.clear()
            self.num_bytes = 0
        return files

    def scan(self) -> None:
        """Read the content of the folder, and delete files that were never completed. A folder that
        cannot be read counts as empty."""
        found = sorted(_files(self.folder))
        with self._lock:
            order = {one.key: one for one in found}
            for key in list(self._blocks):
                if key not in order:
                    self._take(key)
            for key, one in order.items():
                block = one.block
                known = self._blocks.get(key)
                # This server or, later, another one may have used the block.
                if known is not None and known.used_s > one.used_s:
                    block = block._replace(used_s=known.used_s)
                self._put(key, block)
            # In the order of their last use by any server.
            for key, _ in sorted(self._blocks.items(), key=_last_use):
                self._blocks.move_to_end(key)

    def _put(self, key: bytes, block: StoredBlock) -> None:
        self._take(key)
        self._blocks[key] = block
        self._counts[block.model] += 1
        self.num_bytes += block.num_bytes

    def _take(self, key: bytes) -> StoredBlock | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._counts[block.model] -= 1
            self.num_bytes -= block.num_bytes
        return block


def _last_use(entry: tuple[bytes, StoredBlock]) -> float:
    return entry[1].used_s


def _files(folder: Path) -> Iterator[FoundBlock]:
    """All blocks below a folder."""
    for model in _entries(folder):
        if not _MODEL.fullmatch(model.name):
            continue
        for prefix in _entries(Path(model.path)):
            if not _PREFIX.fullmatch(prefix.name):
                continue
            for entry in _entries(Path(prefix.path)):
                yield from _block(model.name, entry)


def _block(model: str, entry: os.DirEntry[str]) -> Iterator[FoundBlock]:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return  # it has just gone
    if entry.name.endswith(TEMPORARY) and time.time() - status.st_mtime > ABANDONED_S:
        with suppress(OSError):
            os.unlink(entry.path)
    if _BLOCK.fullmatch(entry.name):
        key = bytes.fromhex(entry.name.removesuffix(SUFFIX))
        block = StoredBlock(model, status.st_size, status.st_mtime, status.st_mtime)
        yield FoundBlock(status.st_mtime, key, block)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []

"""The files of all keys: a record each, and a content in a folder.

The folder is beside the records; without a folder for state it is a temporary one, which ends with
the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.batches.records import StoredFile
from weft.config.limits import Limits
from weft.state.store import StateStore

FILE = "file"  # kind of the records
FOLDER = "files"  # within the folder for state


class BatchRefused(Exception):
    """A file or a batch that is not taken. `limit` is a field of `Limits`, `param` of the body."""

    def __init__(self, message: str, *, limit: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.param = param


class FileNotStored(Exception):
    """The disk takes no more, or the folder cannot be written."""


class StoredFiles:
    """Raises OSError where a disk takes nothing."""

    def __init__(
        self, limits: Limits, state: StateStore | None, clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._state = state
        self._clock = clock
        self._own_folder: Path | None = None  # that ends with this object
        self._folder: Path | None = None
        self.by_id: dict[str, StoredFile] = {}
        self._num_of: Counter[str] = Counter()  # files of each owner
        if state is not None:
            self._folder = state.folder / FOLDER
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._restore(state)

    def path_of(self, id: str) -> Path:
        """Where the content of a file is. A folder for state that is removed meanwhile is not made
        again: it would be in the way of whoever puts the old one back."""
        if self._folder is None:
            self._own_folder = Path(tempfile.mkdtemp(prefix="weft-files-"))
            self._folder = self._own_folder
        if self._own_folder is not None:
            self._own_folder.mkdir(mode=0o700, exist_ok=True)
        return self._folder / id

    def content_of(self, file: StoredFile) -> Path:
        """Raises BatchRefused for a file whose content is not on the disk any more."""
        path = self.path_of(file.id)
        if not path.is_file():
            raise BatchRefused(f"the content of {file.id} is not on the disk any more")
        return path

    def require_room(self, owner: str) -> None:
        """Before a file is received. Raises BatchRefused."""
        most = self._limits.max_files
        if self._num_of[owner] >= most:
            raise BatchRefused(
                f"there are {most:,} files of this key, and no more are allowed; delete some",
                limit="max_files",
            )

    def new_id(self) -> str:
        """The id of a file that is not there yet."""
        return f"file-{secrets.token_hex(12)}"

    async def store(
        self,
        source: BinaryIO,
        owner: str,
        filename: str,
        purpose: str,
        expires_after_s: float | None = None,
    ) -> StoredFile:
        """Keep what is left of `source` as a new file. Raises FileNotStored; then nothing is
        kept."""
        id = self.new_id()
        path = self.path_of(id)
        try:
            await asyncio.to_thread(_copy, source, path)
            return self.add(id, owner, filename, purpose, expires_after_s)
        except OSError as exc:
            path.unlink(missing_ok=True)
            raise FileNotStored(f"the file could not be stored: {exc.strerror}") from exc

    def add(
        self, id: str, owner: str, filename: str, purpose: str, expires_after_s: float | None = None
    ) -> StoredFile:
        """Enter a file whose content is at `path_of(id)`."""
        now = self._clock()
        file = StoredFile(
            id=id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=self.path_of(id).stat().st_size,
            created_s=now,
            expires_s=None if expires_after_s is None else now + expires_after_s,
        )
        self._enter(file)
        self._put(file)
        return file

    def put_again(self) -> None:
        """Write all records once more, because the disk has lost them."""
        for file in self.by_id.values():
            self._put(file)

    def file_of(self, id: str, owner: str) -> StoredFile | None:
        file = self.by_id.get(id)
        return file if file is not None and file.owner == owner else None

    def drop(self, file: StoredFile) -> None:
        """Delete a file, whoever reads it."""
        self._forget(file.id)
        self.path_of(file.id).unlink(missing_ok=True)

    def drop_expired(self, needed: set[str]) -> None:
        """Delete the files whose time is over, except those with the ids `needed`."""
        now = self._clock()
        for file in list(self.by_id.values()):
            is_over = file.expires_s is not None and file.expires_s <= now
            if is_over and file.id not in needed:
                self.drop(file)

    def take_back(self, id: str, path: Path) -> None:
        """Move the content of a file, if it is there, to `path`, if nothing is there, and forget
        the file."""
        made = self.path_of(id)
        if made.exists() and not path.exists():
            os.replace(made, path)
        if id in self.by_id:
            self._forget(id)

    def remove_strays(self, needed: set[str]) -> None:
        """Remove contents that neither a record nor `needed` names."""
        folder = self.path_of("x").parent
        for path in folder.iterdir():
            if path.name not in self.by_id and path.name not in needed:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what ends with the server."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _enter(self, file: StoredFile) -> None:
        if file.id not in self.by_id:
            self._num_of[file.owner] += 1
        self.by_id[file.id] = file

    def _put(self, file: StoredFile) -> None:
        if self._state is not None:
            self._state.put(FILE, file.owner, file.id, {"": msgspec.json.encode(file)})

    def _forget(self, id: str) -> None:
        file = self.by_id.pop(id)
        self._num_of[file.owner] -= 1
        if self._state is not None:
            self._state.delete(FILE, file.owner, id)

    def _restore(self, state: StateStore) -> None:
        for part in state.read(FILE):
            file = msgspec.json.decode(part.body, type=StoredFile)
            if self.path_of(file.id).exists():
                self._enter(file)


def _copy(source: BinaryIO, path: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())  # the answer says that it is stored

"""Records in one SQLite database, which survive the end of the server, also by kill -9.

    put, delete ─▶ queue ─▶ the thread: one transaction for all that waits ─▶ settled

Whoever tells a client that something is stored waits for `settled` first. The event loop never
waits for a disk: only the thread uses the database once it runs, and what comes while it writes is
one transaction, with one flush. A transaction is there as a whole after a crash, or not at all.

A record belongs to an owner (the name of an API key), and has parts, which are written together:

    kind "response", owner "alice", name "resp_1": parts "", "history", "items"
    kind "session",  owner "alice", name "chat":   parts "", one for each turn

This module does not know the meaning of any kind.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.observe.log import EventLog

FILE = "state.sqlite3"
LOCK = "lock"
FORMAT = 1  # of the tables and of the bodies of all records
APPLICATION = 0x77656674  # "weft", in the header of the file
BUSY_S = 5.0  # for another program that looks into the file
RETRY_S = 1.0  # after a write that failed
OVERWRITE_BYTES = 1 << 20  # at a time
# Kept for the next try while the disk takes nothing; with more, clients are refused.
MAX_UNWRITTEN_BYTES = 256_000_000
MAX_UNWRITTEN = 100_000  # records

TABLE = """
CREATE TABLE records (
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    part TEXT NOT NULL,
    used_s REAL NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, owner, name, part)
)
"""
# A part keeps its place in the order of insertion when it is written again.
PUT = """
INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET used_s = excluded.used_s, body = excluded.body
"""
DELETE = "DELETE FROM records WHERE kind = ? AND owner = ? AND name = ?"
DELETE_PART = f"{DELETE} AND part = ?"
READ = "SELECT owner, name, part, used_s, body FROM records WHERE kind = ? ORDER BY rowid"
COUNT = """
SELECT kind, COUNT(*) FILTER (WHERE part = ''), SUM(LENGTH(body)),
       MIN(used_s) FILTER (WHERE part = ''), MAX(used_s) FILTER (WHERE part = '')
FROM records GROUP BY kind ORDER BY kind
"""
OLD = "SELECT owner, name FROM records WHERE kind = ? AND part = '' AND used_s <= ?"

T = TypeVar("T")
log = EventLog("state")


class StateError(Exception):
    """The state cannot be used, or could not be written. The message is for the user."""


class RecordPart(NamedTuple):
    owner: str
    name: str
    part: str
    used_s: float  # Unix time
    body: bytes


class KindCount(msgspec.Struct, frozen=True, kw_only=True):
    """All records of one kind."""

    kind: str
    records: int
    bytes: int
    oldest_s: float  # seconds since the record that was used longest ago
    newest_s: float


class _Write(NamedTuple):
    """A change of one record; all of it is written, or none."""

    record: tuple[str, str, str]  # kind, owner, name
    is_new: bool  # what was there before goes
    used_s: float
    parts: dict[str, bytes | None]  # in the order of their first writes; None: it goes

    @property
    def num_bytes(self) -> int:
        return sum(len(body) for body in self.parts.values() if body is not None)

    def then(self, later: _Write) -> _Write:
        """Both as one change."""
        if later.is_new:
            return later
        parts = dict(self.parts)
        for part, body in later.parts.items():
            if parts.get(part) is None:
                parts.pop(part, None)  # it comes back as the last one
            parts[part] = body
        return later._replace(is_new=self.is_new, parts=parts)

    def execute(self, connection: sqlite3.Connection) -> None:
        if self.is_new:
            connection.execute(DELETE, self.record)
        gone = [part for part, body in self.parts.items() if body is None]
        connection.executemany(DELETE_PART, [(*self.record, part) for part in gone])
        rows = [
            (*self.record, part, self.used_s, body)
            for part, body in self.parts.items()
            if body is not None
        ]
        connection.executemany(PUT, rows)


class _Put(NamedTuple):
    number: int  # the changes are numbered as they come
    write: _Write


class _Unwritten:
    """What is not on disk yet, by record: each change costs what it has, however much waits."""

    def __init__(self) -> None:
        self._by_record: dict[tuple[str, str, str], _Write] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_record)

    def __iter__(self) -> Iterator[_Write]:
        return iter(self._by_record.values())

    @property
    def is_full(self) -> bool:
        return self._num_bytes > MAX_UNWRITTEN_BYTES or len(self._by_record) > MAX_UNWRITTEN

    def add(self, write: _Write) -> None:
        before = self._by_record.get(write.record)
        if before is not None:
            self._num_bytes -= before.num_bytes
            if write.is_new:
                del self._by_record[write.record]  # it becomes the last one, as on the disk
            write = before.then(write)
        self._by_record[write.record] = write
        self._num_bytes += write.num_bytes

    def clear(self) -> None:
        self._by_record.clear()
        self._num_bytes = 0


class _Question(NamedTuple):
    ask: Callable[[sqlite3.Connection], Any]
    answer: asyncio.Future[Any]


class StateStore:
    """The records of one folder. It belongs to one event loop; `close` may be called anywhere.

    Raises StateError if the folder cannot be used, or if another server uses it.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.folder = folder
        self._lock = _locked(folder)
        try:
            self._connection = _connect(folder / FILE)
            self._file = _file_id(folder / FILE)
        except (StateError, OSError):
            os.close(self._lock)
            raise
        self.fault = ""  # why the last write failed; "": it did not. The thread writes it
        self._queue: queue.SimpleQueue[_Put | _Question | None] = queue.SimpleQueue()
        self._num_put = 0
        self._num_done = 0  # the thread writes it: all up to this number is on disk
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._unwritten = _Unwritten()  # of the thread
        self._is_full = False  # the thread writes it
        self.num_commits = 0

    def read(
        self,
        kind: str,
    ) -> list[RecordPart]:
        """All parts of all records of a kind that are on disk, in the order of their first writes.
        For the start: it blocks."""
        with closing(sqlite3.connect(self.folder / FILE, timeout=BUSY_S)) as connection:
            return _read(connection, kind)

    # ---- what the event loop asks for

    def require_room(self) -> None:
        """Before something begins that has to be stored. Raises StateError while too much waits for
        a disk that takes nothing; what has begun may still be put."""
        if self._is_full:
            raise StateError(f"too much waits to be written to {self.folder}")

    def why_gone(self) -> str:
        """Why nothing can be written, if the file was removed or replaced; else ""."""
        if self._file is None or _file_id(self.folder / FILE) == self._file:
            return ""
        # SQLite would go on in a file that has no name any more.
        return (
            f"{self.folder / FILE} was removed or replaced while the server runs; put it back, or "
            "start the server again to begin with an empty state"
        )

    def put(
        self,
        kind: str,
        owner: str,
        name: str,
        parts: Mapping[str, bytes],
        *,
        without: Iterable[str] = (),
        is_new: bool = False,
    ) -> None:
        """Write parts of a record, in place of parts with the same names, and remove the parts
        `without`; with `is_new`, remove all that was there before. This is done together."""
        changes: dict[str, bytes | None] = dict.fromkeys(without)
        changes.update(parts)
        self._send(_Write((kind, owner, name), is_new, self.clock(), changes))

    def delete(
        self,
        kind: str,
        owner: str,
        name: str,
    ) -> None:
        """Remove a record, if it is there."""
        self._send(_Write((kind, owner, name), True, 0.0, {}))

    async def settled(self) -> None:
        """Wait until all that was put and deleted is on disk. Raises StateError if it could not be
        written; it is tried again then."""
        self._loop = asyncio.get_running_loop()  # before the comparison: the thread reads it after
        if self._num_done >= self._num_put:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._num_put, waiter))
        await waiter

    async def ask(
        self,
        question: Callable[[sqlite3.Connection], T],
    ) -> T:
        """What the thread finds in the database, after all that was put."""
        self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._start()
        self._queue.put(_Question(question, answer))
        return await answer

    async def read_later(
        self,
        kind: str,
    ) -> list[RecordPart]:
        """`read`, while the thread runs."""
        return await self.ask(lambda connection: _read(connection, kind))

    async def counts(self) -> list[KindCount]:
        now = self.clock()
        return await self.ask(lambda connection: _counts(connection, now))

    async def unused(
        self,
        kind: str,
        older_than_s: float,
    ) -> list[tuple[str, str]]:
        """Owner and name of the records that nobody has used for so long."""
        limit = self.clock() - older_than_s
        return await self.ask(lambda connection: connection.execute(OLD, (kind, limit)).fetchall())

    async def give_back(self) -> None:
        """Return the room of deleted records to the file system."""

        def shrink(connection: sqlite3.Connection) -> None:
            # A page a step: `execute` would end after the first, because it gives no row.
            connection.executescript("PRAGMA incremental_vacuum")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

        await self.ask(shrink)

    async def begin_anew(self) -> bool:
        """Overwrite and remove the files, and begin with an empty database, unless all that was put
        can be written now. What is not written yet stays, and is written then. Returns whether it
        did. For a disk without room, on which not even a deletion can be written: all that is in
        the files must have been deleted before."""
        return await self.ask(lambda connection: self._begin_anew())

    def close(self) -> None:
        """Write what was put, and close the database. A second call does nothing."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._lock >= 0:
            self._connection.close()
            os.close(self._lock)
            self._lock = -1

    def _send(
        self,
        write: _Write,
    ) -> None:
        self._num_put += 1
        number = self._num_put
        self._start()
        self._queue.put(_Put(number, write))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-state", daemon=True)
            self._thread.start()

    def _tell(
        self,
        number: int,
        error: StateError | None,
    ) -> None:
        """In the event loop: all up to `number` is on disk, or could not be written."""
        still = []
        for wanted, waiter in self._waiting:
            if wanted > number:
                still.append((wanted, waiter))
            elif waiter.done():
                continue  # who waited has left
            elif error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(StateError(str(error)))
        self._waiting = still

    # ---- the thread

    def _run(self) -> None:
        last = 0  # the number of the newest write
        is_open = True
        while is_open:
            batch = self._next_batch()
            for one in batch:
                if isinstance(one, _Put):
                    last = one.number
                    self._unwritten.add(one.write)
            if self._unwritten:
                self._write(last)
            for one in batch:
                if isinstance(one, _Question):
                    self._answer(one)
            is_open = None not in batch

    def _next_batch(self) -> list[_Put | _Question | None]:
        """All that waits, as soon as anything does. After a write that failed: all that comes until
        the next try, which costs as much as all that is unwritten."""
        batch: list[_Put | _Question | None] = []
        until = time.monotonic() + RETRY_S
        while self._unwritten and None not in batch[-1:]:
            try:
                batch.append(self._queue.get(timeout=max(until - time.monotonic(), 0)))
            except queue.Empty:
                return batch
        if not batch:
            batch.append(self._queue.get())
        while True:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                return batch

    def _write(
        self,
        last: int,
    ) -> None:
        """Write all that is unwritten: the changes up to the number `last`."""
        error = None
        try:
            self._commit(self._unwritten)
        except Exception as exc:  # whatever it is: all that wait must be told
            error = StateError(f"the state could not be written to {self.folder}: {exc}")
            log.seldom("not_written", folder=self.folder, reason=exc)
            self.fault = str(exc)
            self._is_full = self._unwritten.is_full
        else:
            if self.fault:
                log.info("written_again", writes=len(self._unwritten))
                self.fault = ""
            self._unwritten.clear()
            self._is_full = False
            self._num_done = last
        self._call(self._tell, last, error)

    def _commit(
        self,
        writes: Iterable[_Write],
    ) -> None:
        gone = self.why_gone()
        if gone:
            raise StateError(gone)
        if self._file is None:
            self._open_again()  # it could not be made when all began anew
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for one in writes:
                one.execute(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.num_commits += 1

    def _open_again(self) -> None:
        path = self.folder / FILE
        self._connection = _connect(path)
        self._file = _file_id(path)

    def _begin_anew(self) -> bool:
        if not self._unwritten:
            return False
        gone = self.why_gone()
        if gone:
            raise StateError(gone)
        path = self.folder / FILE
        self._connection.close()
        self._file = None
        for one in (path, *(Path(f"{path}{suffix}") for suffix in ("-wal", "-shm"))):
            _overwrite(one)
        self._open_again()
        log.info("begun_anew", folder=self.folder)
        return True

    def _answer(
        self,
        question: _Question,
    ) -> None:
        answer = question.answer
        try:
            found = question.ask(self._connection)
        except Exception as exc:  # whatever it is: who asked must be told
            message = f"the state in {self.folder} could not be read: {exc}"
            self._call(_set_exception, answer, StateError(message))
        else:
            self._call(_set_result, answer, found)

    def _call(
        self,
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Call a function in the event loop, if it still runs."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has been closed, and nobody waits
                self._loop.call_soon_threadsafe(function, *arguments)


def _set_result(
    future: asyncio.Future[Any],
    value: Any,
) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(
    future: asyncio.Future[Any],
    exc: Exception,
) -> None:
    if not future.done():
        future.set_exception(exc)


def _read(
    connection: sqlite3.Connection,
    kind: str,
) -> list[RecordPart]:
    return [RecordPart(*row) for row in connection.execute(READ, (kind,))]


def _counts(
    connection: sqlite3.Connection,
    now: float,
) -> list[KindCount]:
    found = []
    for kind, num, num_bytes, oldest_s, newest_s in connection.execute(COUNT):
        found.append(
            KindCount(
                kind=kind,
                records=num,
                bytes=num_bytes,
                oldest_s=max(now - (oldest_s or now), 0.0),
                newest_s=max(now - (newest_s or now), 0.0),
            )
        )
    return found


# ---- the files


def _locked(folder: Path) -> int:
    """The handle of the folder's lock, which no other process has. It ends with the process."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(
            folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except OSError as exc:
        raise StateError(f"the folder {folder} cannot be used: {exc.strerror}") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(handle)
        raise StateError(f"the folder {folder} is in use by another server") from exc
    return handle


def _file_id(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one with its name; None: there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _overwrite(path: Path) -> None:
    """Overwrite a file where it is, which takes no room, and remove it."""
    with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        left = file.seek(0, os.SEEK_END)
        file.seek(0)
        while left > 0:
            left -= file.write(bytes(min(left, OVERWRITE_BYTES)))
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)


def _connect(path: Path) -> sqlite3.Connection:
    """The database, made if it is not there. Raises StateError."""
    try:
        # Others must not read it; the other files of the database get the same permissions.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as exc:
        raise StateError(f"{path} cannot be opened: {exc}") from exc
    try:
        _prepare(connection, path)
    except sqlite3.OperationalError as exc:  # locked, read-only, a full disk: the file is whole
        connection.close()
        raise StateError(f"{path} cannot be used: {exc}") from exc
    except sqlite3.Error as exc:
        connection.close()
        reason = " ".join(str(exc).split())  # SQLite's check writes lines
        raise StateError(
            f"{path} is damaged: {reason}; move it away to begin with an empty state"
        ) from exc
    except StateError:
        connection.close()
        raise
    return connection


def _prepare(
    connection: sqlite3.Connection,
    path: Path,
) -> None:
    def pragma(text: str) -> Any:
        row = connection.execute(f"PRAGMA {text}").fetchone()
        return None if row is None else row[0]

    has_tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    if has_tables:
        _require_format(path, pragma("application_id"), pragma("user_version"))
        wrong = pragma("quick_check(1)")
        if wrong != "ok":
            raise sqlite3.DatabaseError(wrong)
    else:
        pragma("auto_vacuum = INCREMENTAL")
    pragma("journal_mode = WAL")
    pragma("synchronous = FULL")  # a commit returns when it is on the disk
    pragma("secure_delete = ON")  # what is deleted is overwritten
    if not has_tables:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(TABLE)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")


def _require_format(
    path: Path,
    application: int,
    version: int,
) -> None:
    if application != APPLICATION:
        raise StateError(f"{path} is a database of another program; move it away")
    if version != FORMAT:
        whose = "a newer" if version > FORMAT else "an older"
        raise StateError(
            f"{path} has format {version}, of {whose} weft; this one reads and writes format "
            f"{FORMAT}: start that weft, or move the file away to begin with an empty state"
        )

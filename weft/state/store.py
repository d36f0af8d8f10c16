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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
MAX_UNWRITTEN_BYTES = 256_000_000  # kept for the next try while the disk takes nothing

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
    """Rows of one record; all of them are written, or none."""

    number: int
    sql: str
    rows: list[tuple[Any, ...]]  # kind, owner, name and, with some statements, more

    @property
    def record(self) -> tuple[Any, ...]:
        return self.rows[0][:3]

    @property
    def parts(self) -> tuple[str, ...]:
        """Empty: the whole record."""
        return tuple(row[3] for row in self.rows if len(row) > 3)

    @property
    def num_bytes(self) -> int:
        return sum(len(value) for row in self.rows for value in row if isinstance(value, bytes))


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
        except StateError:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[_Write | _Question | None] = queue.SimpleQueue()
        self._num_put = 0
        self._num_done = 0  # the thread writes it: all up to this number is on disk
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._unwritten: list[_Write] = []
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

    def put(
        self,
        kind: str,
        owner: str,
        name: str,
        parts: Mapping[str, bytes],
    ) -> None:
        """Write parts of a record, in place of parts with the same names. They are written
        together."""
        now = self.clock()
        rows = [(kind, owner, name, part, now, body) for part, body in parts.items()]
        self._send(PUT, rows)

    def delete(
        self,
        kind: str,
        owner: str,
        name: str,
    ) -> None:
        """Remove a record, if it is there."""
        self._send(DELETE, [(kind, owner, name)])

    def delete_parts(
        self,
        kind: str,
        owner: str,
        name: str,
        parts: Sequence[str],
    ) -> None:
        if parts:
            self._send(DELETE_PART, [(kind, owner, name, part) for part in parts])

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
        sql: str,
        rows: list[tuple[Any, ...]],
    ) -> None:
        self._num_put += 1
        self._start()
        self._queue.put(_Write(self._num_put, sql, rows))

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
        is_open = True
        while is_open:
            batch = self._next_batch()
            writes = [*self._unwritten, *(one for one in batch if isinstance(one, _Write))]
            if writes:
                self._write(writes)
            for one in batch:
                if isinstance(one, _Question):
                    self._answer(one)
            is_open = None not in batch

    def _next_batch(self) -> list[_Write | _Question | None]:
        """All that waits, as soon as anything does. Empty if only a failed write waits."""
        try:
            batch = [self._queue.get(timeout=RETRY_S if self._unwritten else None)]
        except queue.Empty:
            return []
        while True:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                return batch

    def _write(
        self,
        writes: list[_Write],
    ) -> None:
        last = writes[-1].number
        error = None
        try:
            self._commit(writes)
        except sqlite3.Error as exc:
            error = StateError(f"the state could not be written to {self.folder}: {exc}")
            log.seldom("not_written", folder=self.folder, reason=exc)
            self._unwritten = _latest(writes)
            if sum(one.num_bytes for one in self._unwritten) > MAX_UNWRITTEN_BYTES:
                log.error("given_up", writes=len(self._unwritten))
                self._unwritten = []
        else:
            if self._unwritten:
                log.info("written_again", writes=len(writes))
                self._unwritten = []
            self._num_done = last
        self._call(self._tell, last, error)

    def _commit(
        self,
        writes: Iterable[_Write],
    ) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for one in writes:
                connection.executemany(one.sql, one.rows)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.num_commits += 1

    def _answer(
        self,
        question: _Question,
    ) -> None:
        answer = question.answer
        try:
            found = question.ask(self._connection)
        except sqlite3.Error as exc:
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


def _latest(writes: Iterable[_Write]) -> list[_Write]:
    """The writes that count, in order: of the same parts, and of a record as a whole, the last."""
    found: dict[tuple[Any, ...], _Write] = {}
    for one in writes:
        if one.sql == DELETE:
            for key in [key for key in found if key[0] == one.record]:
                del found[key]
        key = (one.record, one.sql, one.parts)
        found.pop(key, None)
        found[key] = one
    return list(found.values())


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

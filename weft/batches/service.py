"""The files and batches of all keys of one server.

Both are records of `StateStore`, and contents are files in a folder beside it; without a folder for
state they end with the server. A file or a batch belongs to the key that made it: to any other key
its id is unknown.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.batches import results
from weft.batches.files import BatchRefused, StoredFiles
from weft.batches.forms.anthropic import ANTHROPIC
from weft.batches.forms.openai import OPENAI
from weft.batches.forms.protocol import Form
from weft.batches.line_file import lines_of
from weft.batches.records import BatchRecord, StoredFile
from weft.batches.runner import WINDOW, BatchRunner, RouteCall
from weft.config.limits import Limits
from weft.json_types import JsonObject
from weft.observe.log import EventLog
from weft.state.store import StateStore

BATCH = "batch"  # kind of the records
LINE_LEN = 10_000  # bytes of a line beside those of its request
EXPIRY_S = 1.0  # between two looks at what expires
FORMS: dict[str, Form] = {form.name: form for form in (OPENAI, ANTHROPIC)}

log = EventLog("batches")
R = TypeVar("R", StoredFile, BatchRecord)


class BatchService:
    """Raises OSError where a disk takes nothing."""

    def __init__(
        self,
        limits: Limits,
        state: StateStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        # Of a request: a line has little beside one, and its route says exactly what is too large.
        largest_mb = max(limits.max_body_mb, limits.max_media_mb)
        self._longest_line = int(largest_mb * 1_000_000) + LINE_LEN
        self._state = state
        self._clock = clock
        self._call: RouteCall | None = None
        self.files = StoredFiles(limits, state, clock)
        self.batches: dict[str, BatchRecord] = {}
        self._runners: dict[str, BatchRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        if state is not None:
            self._restore(state)

    # ---- life

    def answer_with(self, call: RouteCall) -> None:
        """Ask the routes of this server by `call`."""
        self._call = call

    def go_on(self) -> None:
        """In the event loop, once requests are accepted: answer what earlier servers have left."""
        for batch in self.batches.values():
            if batch.is_open:
                self._start(batch)
        self._watch_expiry()

    def stop(self) -> None:
        """Answer nothing more. What is open goes on with the next server on this state."""
        self._is_stopping = True
        for task in self._tasks.values():
            task.cancel()

    def close(self) -> None:
        """Remove what ends with the server."""
        if self._watch is not None:
            self._watch.cancel()
        self.files.close()

    async def settled(self) -> None:
        """Wait until records are on disk. Raises StateError."""
        if self._state is not None:
            await self._state.settled()

    # ---- files

    def delete_file(self, file: StoredFile) -> None:
        """Raises BatchRefused while a batch reads it."""
        for batch in self.batches.values():
            if batch.is_open and batch.input_file == file.id:
                raise BatchRefused(f"the batch {batch.id} reads this file; cancel it first")
        self.files.drop(file)

    # ---- batches

    async def add_batch(
        self,
        owner: str,
        form: Form,
        path: str,
        file: StoredFile,
        *,
        prefix: str,
        window: str,
        window_s: float,
        metadata: JsonObject,
        results_expire_s: float | None = None,
    ) -> BatchRecord:
        """Begin a batch. `prefix`: of its id. Raises BatchRefused."""
        most = self._limits.max_open_batches
        if sum(one.is_open and one.owner == owner for one in self.batches.values()) >= most:
            raise BatchRefused(
                f"there are {most:,} open batches of this key, and no more are allowed",
                limit="max_open_batches",
            )
        num_lines = await asyncio.to_thread(
            _num_lines, self.files.content_of(file), self._longest_line
        )
        longest = self._limits.max_batch_lines
        if not num_lines:
            raise BatchRefused("the file has no lines", param="input_file_id")
        if num_lines > longest:
            raise BatchRefused(
                f"the file has {num_lines:,} lines; at most {longest:,} are allowed",
                limit="max_batch_lines",
                param="input_file_id",
            )
        now = self._clock()
        batch = BatchRecord(
            id=f"{prefix}{secrets.token_hex(12)}",
            owner=owner,
            form=form.name,
            path=path,
            input_file=file.id,
            created_s=now,
            expires_s=now + window_s,
            window=window,
            metadata=metadata,
            results_expire_s=results_expire_s,
            num_lines=num_lines,
        )
        self.batches[batch.id] = batch
        self._put(batch)
        self._start(batch)
        self._watch_expiry()
        return batch

    def batch_of(self, id: str, owner: str, form: Form) -> BatchRecord | None:
        batch = self.batches.get(id)
        if batch is None or batch.owner != owner or batch.form != form.name:
            return None
        return batch

    def cancel(self, batch: BatchRecord) -> None:
        """End an open batch: its lines without an answer are cancelled."""
        if batch.status in ("validating", "in_progress"):
            self._enter(batch, "cancelling")
            self._end_lines(batch, "cancelled")

    def delete_batch(self, batch: BatchRecord) -> None:
        """Raises BatchRefused for an open batch."""
        if batch.is_open:
            raise BatchRefused(f"the batch is {batch.status}; cancel it first")
        del self.batches[batch.id]
        if self._state is not None:
            self._state.delete(BATCH, batch.owner, batch.id)

    def results(self, batch: BatchRecord) -> Path | None:
        """The output of a batch that has ended; None if it has none."""
        if batch.output_file is None or batch.output_file not in self.files.by_id:
            return None
        path = self.files.path_of(batch.output_file)
        if not path.is_file():
            return None
        return path

    def put_again(self) -> None:
        """Write all records once more, because the disk has lost them."""
        self.files.put_again()
        for batch in self.batches.values():
            self._put(batch)

    # ---- the work

    def _start(self, batch: BatchRecord) -> None:
        if self._call is None or self._is_stopping or batch.id in self._tasks:
            return
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _run(self, batch: BatchRecord) -> None:
        assert self._call is not None
        await results.until_back(self._state, batch)
        form = FORMS[batch.form]
        growing = results.growing(self.files, batch, form)
        source = self.files.path_of(batch.input_file)
        results.grow_again(self.files, batch, growing)
        try:
            runner = BatchRunner(
                batch,
                form,
                self._call,
                source=source,
                output=growing.output,
                errors=growing.errors,
                window=self._window,
                longest=self._longest_line,
            )
            self._runners[batch.id] = runner
            if batch.status == "cancelling":
                runner.end("cancelled")
            elif batch.status == "validating":
                self._enter(batch, "in_progress")
            await runner.run()
            await results.until_back(self._state, batch)
            self._finish(batch)
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # whatever it is: the batch ends with it, and no other
            log.error("batch_failed", batch=batch.id, reason=exc)
            await results.until_back(self._state, batch)
            reason = str(exc)
            if isinstance(exc, OSError):
                reason = exc.strerror or "a disk error"  # without the path
            self._fail(batch, f"the batch could not be processed: {reason}")
        finally:
            self._runners.pop(batch.id, None)

    def _window(self) -> int:
        """How many lines each open batch may ask for at once."""
        return max(WINDOW // len(self._runners), 1)

    def _fail(self, batch: BatchRecord, reason: str) -> None:
        """End a batch as such. What was answered stays."""
        batch.failure = reason
        try:
            results.keep(self.files, batch, FORMS[batch.form])
        except OSError as exc:
            log.error("results_lost", batch=batch.id, reason=exc)
        self._enter(batch, "failed")

    def _finish(self, batch: BatchRecord) -> None:
        """All lines have their results: make files of them."""
        status = "cancelled" if batch.status == "cancelling" else "completed"
        if status == "completed" and batch.num_expired:
            status = "expired"
        self._enter(batch, "finalizing")
        results.keep(self.files, batch, FORMS[batch.form])
        self._enter(batch, status)

    def _enter(self, batch: BatchRecord, status: str) -> None:
        batch.status = status
        batch.times = {**batch.times, status: self._clock()}
        self._put(batch)

    def _end_lines(self, batch: BatchRecord, why: str) -> None:
        runner = self._runners.get(batch.id)
        if runner is not None:
            runner.end(why)

    # ---- expiry

    def _watch_expiry(self) -> None:
        if self._watch is None and not self._is_stopping:
            self._watch = asyncio.create_task(self._expire())

    async def _expire(self) -> None:
        while True:
            now = self._clock()
            for batch in list(self.batches.values()):
                if batch.status in ("validating", "in_progress") and batch.expires_s <= now:
                    self._end_lines(batch, "expired")
            reading = {one.input_file for one in self.batches.values() if one.is_open}
            self.files.drop_expired(needed=reading)
            await asyncio.sleep(EXPIRY_S)

    # ---- records

    def _put(self, batch: BatchRecord) -> None:
        if self._state is not None:
            body = msgspec.json.encode(batch)
            self._state.put(BATCH, batch.owner, batch.id, {"": body})

    def _restore(self, state: StateStore) -> None:
        """Enter what is on disk, and remove contents that no record names."""
        for part in state.read(BATCH):
            batch = msgspec.json.decode(part.body, type=BatchRecord)
            self.batches[batch.id] = batch
            if batch.is_open and batch.input_file not in self.files.by_id:
                self._fail(batch, "its input file is not there any more")
        self._remove_strays()

    def _remove_strays(self) -> None:
        needed: set[str] = set()
        for batch in self.batches.values():
            if batch.is_open:
                needed |= results.ids(batch)
        self.files.remove_strays(needed)


def _num_lines(path: Path, longest: int) -> int:
    return sum(1 for _ in lines_of(path, longest))


def newest_first(records: Iterable[R], owner: str) -> list[R]:
    """The records of one key."""
    mine = [one for one in records if one.owner == owner]
    return sorted(mine, key=lambda one: (one.created_s, one.id), reverse=True)

"""Answers the lines of one batch.

Some hundred lines of all batches are open at once: enough for the scheduler to find those that
share a prefix, and few enough for memory and for other requests. What a route answers is appended
to the files of results before the line counts. After a stop the runner reads these files, and goes
on with the lines that are not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from weft.batches.forms.protocol import BadLine, Form, LineRequest, RouteAnswer, WrittenLine
from weft.batches.line_file import LineFile, lines_of
from weft.batches.records import BatchRecord
from weft.batches.tries import Tries
from weft.observe.log import EventLog

WINDOW = 256  # lines of all batches that are open at once
INLINE_LEN = 16_384  # bytes of a line that is read on the event loop; a longer one is in a thread
DISK_WAIT_S = 5.0  # before what could not be written is tried again

log = EventLog("batches")


class RouteCall(Protocol):
    """Asks a route of this server, as background work."""

    async def __call__(self, owner: str, path: str, body: bytes, rid: str) -> RouteAnswer:
        """The answer. Cancelled, it ends the request."""
        ...


class LineId(msgspec.Struct):
    """The part of a line of results that the runner reads again."""

    id: str = ""


class LineResult(NamedTuple):
    written: WrittenLine
    kind: str  # completed, failed, invalid, expired, cancelled


class BatchRunner:
    """`output` and `errors` are the files of results; the same if the API has one. `window`: how
    many lines may be open now, `longest`: how many bytes a line may have."""

    def __init__(
        self,
        batch: BatchRecord,
        form: Form,
        call: RouteCall,
        *,
        source: Path,
        output: Path,
        errors: Path,
        window: Callable[[], int],
        longest: int,
    ) -> None:
        self._batch = batch
        self._form = form
        self._call = call
        self._source = source
        self._window = window
        self._longest = longest
        self._output = LineFile(output)
        self._errors = self._output if errors == output else LineFile(errors)
        self._paths = {output, errors}
        self._results: list[LineResult] = []  # that are not written yet
        self._has_results = asyncio.Event()
        self._is_over = False  # no more results come
        self._is_stopped = False  # what cannot be written now is left to another runner
        self._end_kind = ""  # why lines without an answer are ended now: expired or cancelled
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, why: str) -> None:
        """End the lines without an answer: they are `expired` or `cancelled`."""
        self._end_kind = self._end_kind or why
        if not self._ends.done():
            self._ends.set_result(None)

    async def run(self) -> None:
        """Answer all lines. Cancelled, it stops where it is, and another runner can go on."""
        try:
            done = await asyncio.to_thread(self._recover)
        except BaseException:
            self._close()
            raise
        writer = asyncio.create_task(self._write_results())
        open_lines: set[asyncio.Task[None]] = set()
        try:
            taken: set[str] = set()
            lines = lines_of(self._source, self._longest)
            index = 0
            while True:
                line = next(lines, None)
                if line is None:
                    break
                await self._open(index, line, done, taken, open_lines)
                index += 1
            await _all_of(open_lines)
            self._ends_after_results()
            await asyncio.shield(writer)  # however long the disk is full
        finally:
            for task in open_lines:
                task.cancel()
            await asyncio.gather(*open_lines, return_exceptions=True)
            await self._finish(writer)

    async def _open(
        self,
        index: int,
        line: bytes,
        done: set[int],
        taken: set[str],
        open_lines: set[asyncio.Task[None]],
    ) -> None:
        id = self._id(index)
        try:
            work = await self._read(line)
            if work.custom_id in taken:
                raise BadLine("custom_id is that of an earlier line", work.custom_id)
            taken.add(work.custom_id)
        except BadLine as exc:
            if index not in done:
                self._add(self._form.ended(id, exc.custom_id, "invalid", str(exc)), "invalid")
            return
        if index in done:
            return
        while len(open_lines) >= self._window() and not self._end_kind:
            await asyncio.wait(open_lines, return_when=asyncio.FIRST_COMPLETED)
        if self._end_kind:
            self._end_line(id, work.custom_id)
            return
        task = asyncio.create_task(self._answer(id, work))
        open_lines.add(task)
        task.add_done_callback(open_lines.discard)
        await asyncio.sleep(0)  # others run, however many lines are done

    async def _read(self, line: bytes) -> LineRequest:
        if len(line) > self._longest:
            raise BadLine(f"this line has more than {self._longest:,} bytes, which is the limit")
        if len(line) <= INLINE_LEN:
            return self._form.work(line, self._batch.path)
        return await asyncio.to_thread(self._form.work, line, self._batch.path)

    async def _answer(self, id: str, work: LineRequest) -> None:
        body = msgspec.json.encode({**work.body, "service_tier": "flex"})
        asking = asyncio.create_task(self._until_answered(id, work, body))
        try:
            waited: set[asyncio.Future[Any]] = {asking, self._ends}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self._end_line(id, work.custom_id)
                return
            answer = asking.result()
        finally:
            asking.cancel()
        written = self._form.answered(id, work.custom_id, answer)
        self._add(written, "failed" if written.is_error else "completed")

    async def _until_answered(self, id: str, work: LineRequest, body: bytes) -> RouteAnswer:
        tries = Tries()
        while True:
            answer = await self._call(self._batch.owner, work.path, body, id)
            wait_s = tries.wait_s(answer.status, answer.code)
            if wait_s is None:
                return answer
            await asyncio.sleep(wait_s)

    def _end_line(self, id: str, custom_id: str) -> None:
        message = f"the batch was {self._end_kind} before this line was answered"
        written = self._form.ended(id, custom_id, self._end_kind, message)
        self._add(written, self._end_kind)

    # ---- results

    def _add(self, written: WrittenLine, kind: str) -> None:
        self._results.append(LineResult(written, kind))
        self._has_results.set()

    async def _write_results(self) -> None:
        while not self._is_over or self._results:
            await self._has_results.wait()
            is_written = await self._write()
            if is_written:
                continue
            if self._is_stopped:
                return  # the lines are answered again by the next runner
            await asyncio.sleep(DISK_WAIT_S)

    def _ends_after_results(self) -> None:
        self._is_over = True
        self._has_results.set()

    async def _finish(self, writer: asyncio.Task[None]) -> None:
        """Write what is left, whatever ends the runner."""
        self._is_stopped = True
        self._ends_after_results()
        is_cancelled = False
        while not writer.done():  # nobody may read the files while it writes
            try:
                await asyncio.shield(writer)
            except asyncio.CancelledError:
                is_cancelled = True
        for file in {self._output, self._errors}:
            file.flush()
        self._close()
        if is_cancelled:
            raise asyncio.CancelledError

    def _close(self) -> None:
        """Let another runner append to the files."""
        for file in {self._output, self._errors}:
            file.close()

    async def _write(self) -> bool:
        """Append all results that wait. Returns whether all could be written: the others wait for
        the next try."""
        results = self._results
        self._results = []
        self._has_results.clear()
        is_written = True
        for file, of_errors in ((self._output, False), (self._errors, True)):
            mine = [one for one in results if one.written.is_error == of_errors]
            lines = [msgspec.json.encode(one.written.fields) for one in mine]
            if not lines:
                continue
            try:
                await asyncio.to_thread(file.append, lines)
            except OSError as exc:
                log.seldom("not_written", batch=self._batch.id, reason=exc)
                self._results = mine + self._results
                self._has_results.set()
                is_written = False
                continue
            for one in mine:
                self._count(one.kind, 1)
        return is_written

    def _count(self, kind: str, num: int) -> None:
        batch = self._batch
        if kind == "completed":
            batch.num_completed += num
            return
        batch.num_failed += num
        if kind != "failed":
            name = f"num_{kind}"
            setattr(batch, name, getattr(batch, name) + num)

    # ---- going on

    def _id(self, index: int) -> str:
        return f"{self._batch.id}-{index}"

    def _recover(self) -> set[int]:
        """The indices of the lines whose results are there, and the counts that follow."""
        done: set[int] = set()
        batch = self._batch
        batch.num_lines = sum(1 for _ in lines_of(self._source, self._longest))
        batch.num_completed = 0
        batch.num_failed = 0
        for path in self._paths:
            for line in lines_of(path):
                id = msgspec.json.decode(line, type=LineId).id
                done.add(int(id.rpartition("-")[2]))
                is_error = path == self._errors.path and not _succeeded(line)
                self._count("failed" if is_error else "completed", 1)
        return done


def _succeeded(line: bytes) -> bool:
    """Whether a line of results of an API with one file is an answer."""

    class Result(msgspec.Struct):
        type: str = ""

    class OneFile(msgspec.Struct):
        result: Result = Result()

    return msgspec.json.decode(line, type=OneFile).result.type == "succeeded"


async def _all_of(tasks: set[asyncio.Task[None]]) -> None:
    while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

"""Helper processes that tenants use in turns, for text and media.

A job that nobody waits for any more takes its process with it: the client may be gone, and work
that somebody else's file causes can be long. The process is replaced at once.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from weft.config.helper import HelperFailed
from weft.text.turns import STOPPING, Busy, Workers


class Process(Protocol):
    """`config.helper.Helper`, or something around one."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


P = TypeVar("P", bound=Process)
T = TypeVar("T")


class HelperPool(Generic[P]):
    """Processes that each answer one question at a time. For one event loop."""

    def __init__(self, processes: Sequence[P], what: str) -> None:
        """`what` names the resource in messages to the user."""
        self._workers = Workers(len(processes), what)
        self._shelf = _Shelf(processes)
        self._finalizer = weakref.finalize(self, self._shelf.close)

    def start(self) -> None:
        """Begin to start the process that is used first. Does not wait."""
        self._shelf.start_first()

    async def run(self, work: Callable[[P], T], *, is_long: bool = False) -> T:
        """`work(process)` in a thread, with a process that has begun to start.

        If the caller is cancelled, the process is killed. Raises `Busy`, also after `close`, and
        what `work` raises.
        """
        job = _Job[P]()
        try:
            return await self._workers.run(partial(self._shelf.run, job, work), is_long=is_long)
        except asyncio.CancelledError:
            job.cancel()
            raise

    def close(self) -> None:
        """End all processes, and with them the work that is being done."""
        self._finalizer()
        self._workers.close()


class _Job(Generic[P]):
    """One piece of work: which process does it, and whether anybody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: P | None = None
        self._is_cancelled = False

    def begin(self, process: P) -> bool:
        """Whether the work may begin in this process."""
        with self._lock:
            self._process = process
            return not self._is_cancelled

    def end(self) -> None:
        with self._lock:
            self._process = None

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()


class _Shelf(Generic[P]):
    """The processes that are idle, the one that was used last on top, and the jobs of the others.
    Shared by threads."""

    def __init__(self, processes: Sequence[P]) -> None:
        self._lock = threading.Lock()
        self._idle = list(processes[::-1])
        self._jobs: set[_Job[P]] = set()
        self._is_closed = False

    def start_first(self) -> None:
        with self._lock:
            if self._idle and not self._is_closed:
                self._idle[-1].start()

    def run(self, job: _Job[P], work: Callable[[P], T]) -> T:
        """Do the work in an idle process. Raises `Busy` after `close`, and what `work` raises."""
        process = self._taken(job)
        try:
            process.start()
            if not job.begin(process):
                raise Busy(STOPPING)  # nobody reads it: the caller is gone
            return work(process)
        except HelperFailed:
            if self._is_closed:
                raise Busy(STOPPING) from None
            raise
        finally:
            job.end()
            self._put_back(job, process)

    def close(self) -> None:
        """End the idle processes; the others end with their jobs."""
        with self._lock:
            self._is_closed = True
            idle = self._idle
            self._idle = []
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        for process in idle:
            process.close()

    def _taken(self, job: _Job[P]) -> P:
        """The process that was used last. The other idle ones begin to start, for later."""
        with self._lock:
            if self._is_closed:
                raise Busy(STOPPING)
            process = self._idle.pop()
            self._jobs.add(job)
            for one in self._idle:
                _replace(one)
        return process

    def _put_back(self, job: _Job[P], process: P) -> None:
        with self._lock:
            self._jobs.discard(job)
            if not self._is_closed:
                self._idle.append(process)
                _replace(process)
                return
        process.close()


def _replace(process: Process) -> None:
    """Begin to start a process if it has ended. If that is not possible now, the job that needs it
    tries again."""
    with suppress(OSError):
        process.start()

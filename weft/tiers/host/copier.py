"""The thread that copies between the pool and host memory, one transfer after another, on a stream
of its own; no call waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.observe.log import EventLog
from weft.tiers.host.blocks import HostBlock

log = EventLog("cache")


class HostCopies(Protocol):
    """Host memory of `num_host_pages` pages, and copies between it and the pool."""

    num_host_pages: int
    page_bytes: int

    def save(self, pages: IntArray, places: IntArray) -> None:
        """Copy pages [n] of the pool to places [n]. Returns when the copy is complete."""
        ...

    def load(self, places: IntArray, pages: IntArray) -> None:
        """Copy places [n] to pages [n] of the pool. Returns when the copy is complete."""
        ...


@dataclass(eq=False)
class HostJob:
    """A transfer between pool and host memory."""

    ticket: int
    generation: int  # blocks of an older generation are dropped on arrival
    key: CacheKey
    start: int
    pages: IntArray
    is_read: bool
    asked_s: float
    keys: list[bytes]  # of its blocks, from `start` on
    in_use: list[HostBlock] = field(default_factory=list)  # blocks that it reads
    new: list[IntArray] = field(default_factory=list)  # places of blocks that it brings
    num_below: int = 0  # tokens that the store below has read for it
    is_cancelled: bool = False


class CopiedJob(NamedTuple):
    """A transfer after the copying thread has finished it."""

    job: HostJob
    num_blocks: int  # that were copied
    seconds: float


class Copier:
    """`notify` is called when a transfer has been copied, on the thread."""

    def __init__(self, copies: HostCopies, notify: Callable[[], None]) -> None:
        self._copies = copies
        self._notify = notify
        self.waiting: queue.SimpleQueue[HostJob | None] = queue.SimpleQueue()
        self._lock = threading.Condition()  # protects what the thread writes and the engine reads
        self.done: list[CopiedJob] = []  # until the engine takes them
        self.num_faults = 0

    def start(self) -> None:
        threading.Thread(target=self._copy_all, name="weft-cache-host", daemon=True).start()

    def give(self, job: HostJob) -> None:
        """Let the thread copy. The job does not change any more."""
        self.waiting.put(job)

    def close(self) -> None:
        """End the thread when it has done all its work."""
        self.waiting.put(None)

    def take(self) -> list[CopiedJob]:
        """The transfers that have been copied since the last call."""
        with self._lock:
            done = self.done
            self.done = []
        return done

    def wait(self, timeout_s: float) -> None:
        """Wait until a transfer has been copied."""
        with self._lock:
            self._lock.wait(timeout_s)

    # The thread

    def _copy_all(self) -> None:
        while (job := self.waiting.get()) is not None:
            self.work_on(job)

    def work_on(self, job: HostJob) -> None:
        began_s = time.monotonic()
        num_blocks = 0
        try:
            num_blocks = self._copy(job)
        except Exception as exc:  # after any error the request computes its prompt
            self.num_faults += 1
            log.seldom("block_lost", what="copy", error=f"{type(exc).__name__}: {exc}")
        with self._lock:
            self.done.append(CopiedJob(job, num_blocks, time.monotonic() - began_s))
            self._lock.notify_all()
        self._notify()

    def _copy(self, job: HostJob) -> int:
        """Returns the number of copied blocks."""
        blocks = job.new
        if job.is_read:
            blocks = [block.places for block in job.in_use]
        if job.is_cancelled or not blocks:
            return 0
        places = np.concatenate(blocks)
        if job.is_read:
            self._copies.load(places, job.pages[: len(places)])
        else:
            self._copies.save(job.pages[: len(places)], places)
        return len(blocks)

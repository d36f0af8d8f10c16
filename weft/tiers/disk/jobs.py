"""Transfers between the pool and files: what each consists of, which are under way, and how they
have ended. Several threads use it; a lock protects what they write and the engine reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.arrays import IntArray
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import Landed, TierNews, Written
from weft.observe.log import EventLog
from weft.tiers.keys import KeyChain
from weft.tiers.pages import PoolPages

SETTLE_S = 10.0

log = EventLog("cache")


@dataclass(eq=False)
class TransferJob:
    """A transfer, as a job for a thread."""

    ticket: int
    chain: KeyChain | None  # the keys of its blocks; None: the store is not open
    key: CacheKey
    start: int
    pages: IntArray
    resume_state: IntArray  # empty: no resume state is transferred
    asked_s: float
    has_resume_state: bool = False  # the resume state has been read
    is_cancelled: bool = False


class StoredPart(NamedTuple):
    """A block of a transfer, or its resume state."""

    key: bytes
    tokens: bytes  # of the block, or of the block before the resume state
    pieces: list[memoryview]
    num_tokens: int  # 0: this is a resume state


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Where the blocks of transfers are in memory. `resume_states`: the memory of resume states, if
    sequences have some; None: they can be resumed after every block."""

    pool: PoolPages
    page_size: int
    block_len: int
    resume_states: PoolPages | None

    def parts(self, chain: KeyChain, job: TransferJob) -> Iterator[StoredPart]:
        """The blocks of a transfer in order, and after them its resume state."""
        last = b""
        tokens = b""
        for number, key in enumerate(chain.keys(job.key)):
            last = key
            start = number * chain.block_bytes
            tokens = job.key.tokens[start : start + chain.block_bytes]
            if number * self.block_len >= job.start:
                yield StoredPart(key, tokens, self._pieces(job, number), self.block_len)
        if self.resume_states is not None and len(job.resume_state):
            pieces: list[memoryview] = []
            for position in job.resume_state.tolist():
                pieces += self.resume_states.pieces(position)
            yield StoredPart(chain.resume_state(last), tokens, pieces, 0)

    def _pieces(self, job: TransferJob, number: int) -> list[memoryview]:
        """The memory of a block, page by page."""
        num_pages = self.block_len // self.page_size
        first = (number * self.block_len - job.start) // self.page_size
        pieces: list[memoryview] = []
        for page in job.pages[first : first + num_pages].tolist():
            pieces += self.pool.pieces(page)
        return pieces


class Jobs:
    """The transfers under way, and those that have ended since the engine asked last. `notify` is
    called when there is news, on any thread."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Condition()
        self._under_way: dict[int, TransferJob] = {}  # by ticket
        self._landed: list[Landed] = []
        self._written: list[Written] = []
        self.has_news = False
        self.num_faults = 0

    def __len__(self) -> int:
        return len(self._under_way)

    # Called by the engine

    def add(self, job: TransferJob) -> None:
        with self._lock:
            self._under_way[job.ticket] = job

    def num_pages(self) -> int:
        """Pages of all transfers under way."""
        with self._lock:
            return sum(len(job.pages) for job in self._under_way.values())

    def cancel(self, ticket: int) -> None:
        with self._lock:
            job = self._under_way.get(ticket)
            if job is not None:
                job.is_cancelled = True

    def take(self) -> TierNews:
        """The transfers that have ended since the last call."""
        with self._lock:
            news = TierNews(tuple(self._landed), tuple(self._written))
            self._landed.clear()
            self._written.clear()
            self.has_news = False
        return news

    def settle(self) -> None:
        """Cancel all transfers, wait until they have ended, and forget it."""
        with self._lock:
            for job in self._under_way.values():
                job.is_cancelled = True
            self._lock.wait_for(lambda: not self._under_way, SETTLE_S)
            self._landed.clear()
            self._written.clear()
            self.has_news = False

    # Called by threads

    def is_complete(self, job: TransferJob) -> bool:
        """After the pages were read: whether they still belonged to the job."""
        with self._lock:
            return not job.is_cancelled

    def end_read(self, job: TransferJob, num_tokens: int) -> None:
        seconds = time.monotonic() - job.asked_s
        with self._lock:
            del self._under_way[job.ticket]
            self._landed.append(Landed(job.ticket, num_tokens, seconds, job.has_resume_state))
            self._tell()
        self._notify()

    def end_write(self, job: TransferJob, num_bytes: int) -> None:
        with self._lock:
            del self._under_way[job.ticket]
            if not job.is_cancelled:
                self._written.append(Written(job.ticket, num_bytes))
            self._tell()
        self._notify()

    def failed(self, what: str, exc: Exception) -> None:
        """A block could not be read or written."""
        with self._lock:
            self.num_faults += 1
        log.seldom("block_lost", what=what, error=f"{type(exc).__name__}: {exc}")

    def _tell(self) -> None:
        self.has_news = True
        self._lock.notify_all()

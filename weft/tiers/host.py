"""KV in the memory of the host, for pools on a GPU: the `Tiers` of `--cache-host-gb`, alone or
before a second store.

    keep    pool ─▶ host memory ─▶ (the store below, from there)
    fetch   (the store below ─▶) host memory ─▶ pool

Blocks of the store below are read into host memory first, and are found there afterwards. One
thread copies, one transfer after another, on a stream of its own; no call waits for it. The least
recently used blocks are dropped when others need their places, except blocks in transfer. This
module knows places and pages, but no tensor.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    Landed,
    NoTiers,
    Present,
    Sought,
    TierNews,
    TierReport,
    Tiers,
    Written,
)
from weft.observe.log import EventLog
from weft.tiers.keys import KeyChain

FIRST_RATE = 5e9  # bytes per second, until a rate is measured
LEARNING_RATE = 0.3
SETTLE_S = 10.0

log = EventLog("cache")


class HostCopies(Protocol):
    """Host memory of `num_places` pages, and copies between it and the pool."""

    num_places: int
    page_bytes: int

    def save(self, pages: IntArray, places: IntArray) -> None:
        """Copy pages [n] of the pool to places [n]. Returns when the copy is complete."""
        ...

    def load(self, places: IntArray, pages: IntArray) -> None:
        """Copy places [n] to pages [n] of the pool. Returns when the copy is complete."""
        ...


@dataclass(eq=False)
class HostBlock:
    """A block in host memory."""

    places: IntArray  # [pages of a block]
    users: int = 0  # transfers that read it
    is_dropped: bool = False  # not found any more; its last user frees the places


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
    held: list[HostBlock] = field(default_factory=list)  # blocks that it reads
    new: list[IntArray] = field(default_factory=list)  # places of blocks that it brings
    num_below: int = 0  # tokens that the store below has read for it
    is_cancelled: bool = False


class WriteBelow(NamedTuple):
    """A write of the store below, which follows one of ours."""

    job: HostJob
    num_bytes: int  # that our transfer has copied
    blocks: list[HostBlock]  # that are being written


class CopiedJob(NamedTuple):
    """A transfer after the copying thread has finished it."""

    job: HostJob
    num_tokens: int  # that were copied
    seconds: float


class HostTiers:
    """`below`: the store for blocks that are not here; its pages are our places. `notify` is called
    when there is news, on any thread. Only the engine's thread uses index and places."""

    def __init__(
        self,
        copies: HostCopies,
        *,
        page_size: int,
        block_len: int,
        notify: Callable[[], None],
        below: Tiers | None = None,
    ) -> None:
        self._copies = copies
        self._below: Tiers = below or NoTiers()
        self._has_below = below is not None
        self._block_len = block_len
        self._block_pages = block_len // page_size
        self._notify = notify
        num_blocks = copies.num_places // self._block_pages
        self._num_blocks = num_blocks
        self._block_bytes = self._block_pages * copies.page_bytes
        every = np.arange(num_blocks * self._block_pages, dtype=np.int32)
        self._free = list(every.reshape(num_blocks, self._block_pages)[::-1])
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._jobs: dict[int, HostJob] = {}
        self._generation = 0
        self._chain = self._new_chain()
        self._has_opened = True  # to be reported by `take`
        self._is_stopped = False
        # Transfers of the store below, by its tickets; its reads belong to one of our transfers.
        self._num_tickets = 0
        self._reads_below: dict[int, HostJob] = {}
        self._writes_below: dict[int, WriteBelow] = {}
        self._rate = FIRST_RATE
        self._read_bytes = 0
        self._written_bytes = 0
        self._dropped_blocks = 0
        self._faults = 0
        self._work: queue.SimpleQueue[HostJob] = queue.SimpleQueue()
        # Transfers that the copying thread has finished, until the engine takes them.
        self._lock = threading.Condition()
        self._done: list[CopiedJob] = []
        self._num_working = 0

    def start(self) -> None:
        threading.Thread(target=self._copy_all, name="weft-cache-host", daemon=True).start()

    # Called by the engine

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        num_here = self._num_here(key, have)
        below = self._below.seek(id, key, max(num_here, have), max(num_here, since))
        num_tokens = max(num_here, below.num_tokens)
        if self._is_stopped or num_tokens <= since:
            return NOT_STORED
        num_blocks = (num_tokens - have) // self._block_len
        with self._lock:
            copy_s = num_blocks * self._block_bytes / self._rate
        return Sought(num_tokens, copy_s + below.read_s)

    def lacks(self, key: CacheKey) -> Present:
        num_here = self._num_here(key, 0)
        return Present(max(num_here, self._below.lacks(key).num_tokens))

    def fetch(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, ending: IntArray = NO_PAGES
    ) -> None:
        job = self._enter(ticket, key, start, pages, is_read=True)
        for one in job.keys:
            block = self._blocks.get(one)
            if block is None:
                break
            block.users += 1
            job.held.append(block)
        self._note_use(job.keys)
        lacking = len(job.keys) - len(job.held)
        if lacking and self._has_below:
            job.new = self._take_places(lacking)
        if not job.new:
            self._give(job)
            return
        begin = start + len(job.held) * self._block_len
        end = begin + len(job.new) * self._block_len
        part = CacheKey(key.namespace, key.tokens[: end * TOKEN_BYTES])
        below_ticket = self._new_ticket()
        self._reads_below[below_ticket] = job
        self._below.fetch(below_ticket, part, begin, np.concatenate(job.new))

    def keep(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, ending: IntArray = NO_PAGES
    ) -> None:
        job = self._enter(ticket, key, start, pages, is_read=False)
        # In order, because a block cannot be found without the blocks before it. So no block of a
        # sequence replaces another of the same one, and its end is dropped first.
        own = list(self._chain.keys(key))
        self._note_use(own)
        in_blocks = pages.reshape(-1, self._block_pages)
        lacking = [i for i, one in enumerate(job.keys) if one not in self._blocks]
        job.keys = [job.keys[i] for i in lacking]
        job.pages = in_blocks[lacking].ravel()
        job.new = self._take_places(len(job.keys), frozenset(own))
        self._give(job)

    def cancel(self, ticket: int) -> None:
        job = self._jobs.get(ticket)
        if job is None:
            return
        with self._lock:
            job.is_cancelled = True
        for below_ticket, other in self._reads_below.items():
            if other is job:
                self._below.cancel(below_ticket)

    def take(self) -> TierNews:
        landed: list[Landed] = []
        written: list[Written] = []
        self._take_below(written)
        with self._lock:
            done = self._done
            self._done = []
        for copied in done:
            job = copied.job
            if job.is_read:
                del self._jobs[job.ticket]
                self._end_read(copied)
                seconds = time.monotonic() - job.asked_s
                num_here = max(copied.num_tokens - job.num_below, 0)
                landed.append(
                    Landed(job.ticket, copied.num_tokens, seconds, num_from_host=num_here)
                )
            else:
                num_bytes = self._end_write(copied)
                if not (num_bytes and self._write_below(job, num_bytes)):
                    self._tell_written(job, num_bytes, written)
        has_opened = self._has_opened
        self._has_opened = False
        if not (landed or written or has_opened):
            return NO_NEWS
        return TierNews(tuple(landed), tuple(written), has_opened)

    def clear(self) -> None:
        self._forget()
        self._below.clear()

    def flush(self) -> None:
        self._forget()
        self._below.flush()

    def renew(self, why: str) -> None:
        self._forget()
        self._chain = self._new_chain()
        self._has_opened = not self._is_stopped
        self._below.renew(why)
        self._notify()

    def stop(self, why: str) -> None:
        self._is_stopped = True
        self._forget()
        self._below.stop(why)

    def settle(self) -> None:
        for ticket in list(self._jobs):
            self.cancel(ticket)
        deadline = time.monotonic() + SETTLE_S
        while self._jobs and time.monotonic() < deadline:
            self.take()
            with self._lock:
                self._lock.wait(0.01)
        self._below.settle()
        self._has_opened = not self._is_stopped
        self._notify()

    def report(self) -> TierReport:
        below = self._below.report()
        return below._replace(
            host="stopped" if self._is_stopped else "open",
            host_blocks=len(self._blocks),
            host_bytes=len(self._blocks) * self._block_bytes,
            max_host_bytes=self._num_blocks * self._block_bytes,
            host_read_bytes=self._read_bytes,
            host_written_bytes=self._written_bytes,
            host_dropped_blocks=self._dropped_blocks,
            faults=below.faults + self._faults,
        )

    # Index and places

    def _new_chain(self) -> KeyChain:
        """Keys that are unique to these weights and this process."""
        return KeyChain(os.urandom(32), self._block_len)

    def _num_here(self, key: CacheKey, have: int) -> int:
        """Tokens at the beginning of a sequence that are here, or among the first `have`."""
        num_tokens = 0
        for one in self._chain.keys(key):
            if num_tokens + self._block_len > have and one not in self._blocks:
                break
            num_tokens += self._block_len
        return num_tokens

    def _note_use(self, keys: Sequence[bytes]) -> None:
        """Mark blocks of a sequence as used: its beginning last, because the rest cannot be found
        without it."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def _enter(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, *, is_read: bool
    ) -> HostJob:
        keys = list(self._chain.keys(key))[start // self._block_len :]
        now = time.monotonic()
        job = HostJob(ticket, self._generation, key, start, pages, is_read, now, keys)
        self._jobs[ticket] = job
        return job

    def _new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def _take_places(
        self, num_blocks: int, spared: frozenset[bytes] = frozenset()
    ) -> list[IntArray]:
        """Places for `num_blocks` blocks, or for fewer if too many are in use or `spared`."""
        missing = num_blocks - len(self._free)
        if missing > 0:
            for key, block in list(self._blocks.items()):
                if block.users or key in spared:
                    continue
                del self._blocks[key]
                self._free.append(block.places)
                self._dropped_blocks += 1
                missing -= 1
                if missing <= 0:
                    break
        taken: list[IntArray] = []
        while self._free and len(taken) < num_blocks:
            taken.append(self._free.pop())
        return taken

    def _forget(self) -> None:
        """Drop all blocks that are here or in transfer to here."""
        self._generation += 1
        for block in self._blocks.values():
            if block.users:
                block.is_dropped = True
            else:
                self._free.append(block.places)
        self._blocks.clear()

    def _add(self, key: bytes, places: IntArray, generation: int) -> HostBlock | None:
        """Add a block. Returns it, or the one that was here already; None if it is out of date."""
        if generation != self._generation or self._is_stopped:
            self._free.append(places)
            return None
        if key in self._blocks:
            self._free.append(places)
        else:
            self._blocks[key] = HostBlock(places)
        return self._blocks[key]

    def _let_go(self, blocks: list[HostBlock]) -> None:
        """A transfer no longer reads these blocks."""
        for block in blocks:
            block.users -= 1
            if block.is_dropped and not block.users:
                self._free.append(block.places)

    # Ends of transfers

    def _end_read(self, copied: CopiedJob) -> None:
        self._let_go(copied.job.held)
        self._learn(copied)
        self._read_bytes += copied.num_tokens // self._block_len * self._block_bytes

    def _end_write(self, copied: CopiedJob) -> int:
        """Returns the number of written bytes."""
        job = copied.job
        num_copied = copied.num_tokens // self._block_len
        if job.is_cancelled:
            num_copied = 0  # the pages were no longer its own
        num_added = 0
        for number, places in enumerate(job.new):
            if number >= num_copied:
                self._free.append(places)
            elif self._add(job.keys[number], places, job.generation) is not None:
                num_added += 1
        self._note_use(list(self._chain.keys(job.key)))
        self._learn(copied)
        num_bytes = num_added * self._block_bytes
        self._written_bytes += num_bytes
        return num_bytes

    def _tell_written(self, job: HostJob, num_bytes: int, written: list[Written]) -> None:
        del self._jobs[job.ticket]
        if not job.is_cancelled:
            written.append(Written(job.ticket, num_bytes))

    def _write_below(self, job: HostJob, num_bytes: int) -> bool:
        """Let the store below write the part of a sequence that it lacks. Returns whether there is
        such a part; the write is reported only after that."""
        if not self._has_below:
            return False
        here = self._num_here(job.key, 0)
        key = CacheKey(job.key.namespace, job.key.tokens[: here * TOKEN_BYTES])
        start = self._below.lacks(key).num_tokens
        if start >= here:
            return False
        blocks = []
        for one in list(self._chain.keys(key))[start // self._block_len :]:
            self._blocks[one].users += 1
            blocks.append(self._blocks[one])
        ticket = self._new_ticket()
        self._writes_below[ticket] = WriteBelow(job, num_bytes, blocks)
        self._below.keep(ticket, key, start, np.concatenate([one.places for one in blocks]))
        return True

    def _take_below(self, written: list[Written]) -> None:
        news = self._below.take()
        for ticket, _ in news.written:
            below = self._writes_below.pop(ticket)
            self._let_go(below.blocks)
            self._tell_written(below.job, below.num_bytes, written)
        for landed in news.landed:
            self._came_from_below(self._reads_below.pop(landed.ticket), landed.num_tokens)

    def _came_from_below(self, job: HostJob, num_tokens: int) -> None:
        """The store below has read `num_tokens` of the tokens that a transfer needs."""
        num_blocks = num_tokens // self._block_len
        for number, places in enumerate(job.new):
            if number >= num_blocks:
                self._free.append(places)
                continue
            block = self._add(job.keys[len(job.held)], places, job.generation)
            if block is None:
                num_blocks = number  # later blocks are out of date, too
                continue
            block.users += 1
            job.held.append(block)
            job.num_below += self._block_len
        self._note_use(job.keys)
        job.new = []
        self._give(job)

    def _learn(self, copied: CopiedJob) -> None:
        num_bytes = copied.num_tokens // self._block_len * self._block_bytes
        if num_bytes:
            rate = num_bytes / max(copied.seconds, 1e-6)
            with self._lock:
                self._rate += LEARNING_RATE * (rate - self._rate)

    # The copying thread

    def _give(self, job: HostJob) -> None:
        """Let the thread copy. The job does not change any more."""
        self._work.put(job)

    def _copy_all(self) -> None:
        while True:
            self._work_on(self._work.get())

    def _work_on(self, job: HostJob) -> None:
        began_s = time.monotonic()
        num_tokens = 0
        try:
            num_tokens = self._copy(job)
        except Exception as exc:  # after any error the request computes its prompt
            self._faults += 1
            log.seldom("block_lost", what="copy", error=f"{type(exc).__name__}: {exc}")
        with self._lock:
            self._done.append(CopiedJob(job, num_tokens, time.monotonic() - began_s))
            self._lock.notify_all()
        self._notify()

    def _copy(self, job: HostJob) -> int:
        """Returns the number of copied tokens."""
        blocks = job.new
        if job.is_read:
            blocks = [block.places for block in job.held]
        if job.is_cancelled or not blocks:
            return 0
        places = np.concatenate(blocks)
        if job.is_read:
            self._copies.load(places, job.pages[: len(places)])
        else:
            self._copies.save(job.pages[: len(places)], places)
        return len(blocks) * self._block_len

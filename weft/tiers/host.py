"""KV in the memory of the host, for pools that lie in that of a GPU: the `Tiers` of
`--cache-host-gb`, alone or before a second store.

    keep    pool ─▶ host memory ─▶ (the store below, from there)
    fetch   (the store below ─▶) host memory ─▶ pool

What is read from the store below comes into host memory first, and is found there afterwards. One
thread copies, one transfer after the other, on a stream of its own; nobody waits for it. Blocks
that were not used for longest go when others need their place, but for those that are on their way.
It knows places and pages, never a tensor.
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

FIRST_RATE = 5e9  # bytes a second, until one is measured
LEARNING_RATE = 0.3
SETTLE_S = 10.0

log = EventLog("cache")


class HostCopies(Protocol):
    """Host memory of `num_places` pages, and copies between it and the pool."""

    num_places: int
    page_bytes: int

    def save(self, pages: IntArray, places: IntArray) -> None:
        """Copy pages [n] of the pool to places [n]. Returns when they are there."""
        ...

    def load(self, places: IntArray, pages: IntArray) -> None:
        """Copy places [n] to pages [n] of the pool. Returns when they are there."""
        ...


@dataclass(eq=False)
class HostBlock:
    """A block in host memory."""

    places: IntArray  # [pages of a block]
    users: int = 0  # transfers that read it
    is_dropped: bool = False  # nobody finds it any more; its last user frees the places


@dataclass(eq=False)
class HostJob:
    """A transfer between pool and host memory."""

    ticket: int
    generation: int  # what is forgotten meanwhile is of no use when it has come
    key: CacheKey
    start: int
    pages: IntArray
    is_read: bool
    asked_s: float
    keys: list[bytes]  # of its blocks, from `start` on
    held: list[HostBlock] = field(default_factory=list)  # that it reads
    new: list[IntArray] = field(default_factory=list)  # places of blocks that it brings
    num_below: int = 0  # tokens that the store below has read for it
    is_cancelled: bool = False


class WriteBelow(NamedTuple):
    """A transfer of the store below, behind one of ours."""

    job: HostJob
    num_bytes: int  # that ours has copied
    blocks: list[HostBlock]  # that are being written


class CopiedJob(NamedTuple):
    """The copying thread has done with a transfer."""

    job: HostJob
    num_tokens: int  # that were copied
    seconds: float


class HostTiers:
    """`below`: the store that is asked for what is not here, whose pages are our places; `notify`
    is called when there is news, on any thread. The engine's thread alone owns index and places."""

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
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # the least recent first
        self._jobs: dict[int, HostJob] = {}
        self._generation = 0
        self._chain = self._new_chain()
        self._has_opened = True  # and it is to be told
        self._is_stopped = False
        # Transfers of the store below, by its tickets; those that it reads are for one of ours.
        self._num_tickets = 0
        self._reads_below: dict[int, HostJob] = {}
        self._writes_below: dict[int, WriteBelow] = {}
        self._rate = FIRST_RATE
        self._read_bytes = 0
        self._written_bytes = 0
        self._dropped_blocks = 0
        self._faults = 0
        self._work: queue.SimpleQueue[HostJob] = queue.SimpleQueue()
        # What the copying thread has done, until the engine takes it.
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
        # One behind the other: without its beginning nobody finds a block. So none of a sequence
        # gives its place to another of the same one, and its end goes first.
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
        """Keys that no other weights have, nor another process."""
        return KeyChain(os.urandom(32), self._block_len)

    def _num_here(self, key: CacheKey, have: int) -> int:
        """Tokens of the beginning of a sequence that are here, or among the first `have`."""
        num_tokens = 0
        for one in self._chain.keys(key):
            if num_tokens + self._block_len > have and one not in self._blocks:
                break
            num_tokens += self._block_len
        return num_tokens

    def _note_use(self, keys: Sequence[bytes]) -> None:
        """Blocks of a sequence are used now: its beginning last, without which nobody finds the
        rest."""
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
        """Places for so many blocks, or for fewer, if too many are in use, or `spared`."""
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
        """Find nothing of what is here, nor of what is on its way to here."""
        self._generation += 1
        for block in self._blocks.values():
            if block.users:
                block.is_dropped = True
            else:
                self._free.append(block.places)
        self._blocks.clear()

    def _add(self, key: bytes, places: IntArray, generation: int) -> HostBlock | None:
        """A block is here now. Returns it, or the one that was here; None if it is of no use."""
        if generation != self._generation or self._is_stopped:
            self._free.append(places)
            return None
        if key in self._blocks:
            self._free.append(places)
        else:
            self._blocks[key] = HostBlock(places)
        return self._blocks[key]

    def _let_go(self, blocks: list[HostBlock]) -> None:
        """A transfer does not read these blocks any more."""
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
        """Returns the bytes that were written."""
        job = copied.job
        num_copied = copied.num_tokens // self._block_len
        if job.is_cancelled:
            num_copied = 0  # the pages were not its own any more
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
        """Let the store below have what it lacks of a sequence that is here. Returns whether there
        is something: whoever waits until all is written waits for that, too."""
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
        """The store below has read so many tokens of what is lacking for a transfer."""
        num_blocks = num_tokens // self._block_len
        for number, places in enumerate(job.new):
            if number >= num_blocks:
                self._free.append(places)
                continue
            block = self._add(job.keys[len(job.held)], places, job.generation)
            if block is None:
                num_blocks = number  # what is behind it is of no use either
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
        """Let the thread copy: all that the job says is settled now."""
        self._work.put(job)

    def _copy_all(self) -> None:
        while True:
            self._work_on(self._work.get())

    def _work_on(self, job: HostJob) -> None:
        began_s = time.monotonic()
        num_tokens = 0
        try:
            num_tokens = self._copy(job)
        except Exception as exc:  # whatever it is, the request computes its prompt
            self._faults += 1
            log.seldom("block_lost", what="copy", error=f"{type(exc).__name__}: {exc}")
        with self._lock:
            self._done.append(CopiedJob(job, num_tokens, time.monotonic() - began_s))
            self._lock.notify_all()
        self._notify()

    def _copy(self, job: HostJob) -> int:
        """Returns the tokens that were copied."""
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

"""KV in the memory of the host, for pools on a GPU: the `Tiers` of `--cache-host-gb`, alone or
before a second store.

    keep    pool ─▶ host memory ─▶ (the store below, from there)
    fetch   (the store below ─▶) host memory ─▶ pool

Blocks of the store below are read into host memory first, and are found there afterwards. This
module knows places and pages, but no tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    Landed,
    Present,
    Sought,
    TierNews,
    TierReport,
    Tiers,
    Written,
)
from weft.tiers.host.below import StoreBelow, WriteBelow
from weft.tiers.host.blocks import HostBlocks
from weft.tiers.host.copier import CopiedJob, Copier, HostCopies, HostJob

FIRST_RATE = 5e9  # bytes per second, until a rate is measured
LEARNING_RATE = 0.3
SETTLE_S = 10.0


class HostTiers:
    """`below`: the store for blocks that are not here; its pages are our places. `notify` is called
    when there is news, on any thread."""

    def __init__(
        self,
        copies: HostCopies,
        *,
        page_size: int,
        block_len: int,
        notify: Callable[[], None],
        below: Tiers | None = None,
    ) -> None:
        self._blocks = HostBlocks(copies.num_host_pages, copies.page_bytes, page_size, block_len)
        self._copier = Copier(copies, notify)
        self._below = StoreBelow(below)
        self._notify = notify
        self._jobs: dict[int, HostJob] = {}
        self._has_opened = True  # to be reported by `take`
        self._rate = FIRST_RATE
        self._read_bytes = 0
        self._written_bytes = 0

    def start(self) -> None:
        self._copier.start()

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        blocks = self._blocks
        num_here = blocks.num_here(key, have)
        below = self._below.store.seek(id, key, max(num_here, have), max(num_here, since))
        num_tokens = max(num_here, below.num_tokens)
        if blocks.is_stopped or num_tokens <= since:
            return NOT_STORED
        num_blocks = (num_tokens - have) // blocks.block_len
        copy_s = num_blocks * blocks.block_bytes / self._rate
        return Sought(num_tokens, copy_s + below.read_s)

    def lacks(self, key: CacheKey) -> Present:
        num_here = self._blocks.num_here(key, 0)
        return Present(max(num_here, self._below.store.lacks(key).num_tokens))

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        job = self._enter(ticket, key, start, pages, is_read=True)
        blocks = self._blocks
        job.in_use = blocks.hold(job.keys)
        blocks.note_use(job.keys)
        lacking = len(job.keys) - len(job.in_use)
        if lacking and self._below.is_there:
            job.new = blocks.take_places(lacking)
        if not job.new:
            self._copier.give(job)
            return
        begin = start + len(job.in_use) * blocks.block_len
        end = begin + len(job.new) * blocks.block_len
        part = key.first(end)
        self._below.read(job, part, begin, job.new)

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        job = self._enter(ticket, key, start, pages, is_read=False)
        blocks = self._blocks
        # In order, because a block cannot be found without the blocks before it. So no block of a
        # sequence replaces another of the same one, and its end is dropped first.
        own = list(blocks.chain.keys(key))
        blocks.note_use(own)
        in_blocks = pages.reshape(-1, blocks.block_pages)
        lacking = [i for i, one in enumerate(job.keys) if one not in blocks]
        job.keys = [job.keys[i] for i in lacking]
        job.pages = in_blocks[lacking].ravel()
        job.new = blocks.take_places(len(job.keys), frozenset(own))
        self._copier.give(job)

    def cancel(self, ticket: int) -> None:
        job = self._jobs.get(ticket)
        if job is not None:
            job.is_cancelled = True
            self._below.cancel(job)

    def take(self) -> TierNews:
        landed: list[Landed] = []
        written: list[Written] = []
        self._take_below(written)
        for copied in self._copier.take():
            job = copied.job
            if job.is_read:
                landed.append(self._end_read(copied))
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
        self._blocks.forget()
        self._below.store.clear()

    def flush(self) -> None:
        self._blocks.forget()
        self._below.store.flush()

    def renew(self, why: str) -> None:
        self._blocks.renew()
        self._has_opened = not self._blocks.is_stopped
        self._below.store.renew(why)
        self._notify()

    def stop(self, why: str) -> None:
        self._blocks.is_stopped = True
        self._blocks.forget()
        self._below.store.stop(why)

    def close(self) -> None:
        self._copier.close()
        self._below.store.close()

    def settle(self) -> None:
        for ticket in list(self._jobs):
            self.cancel(ticket)
        deadline = time.monotonic() + SETTLE_S
        while self._jobs and time.monotonic() < deadline:
            self.take()
            self._copier.wait(0.01)
        self._below.store.settle()
        self._has_opened = not self._blocks.is_stopped
        self._notify()

    def report(self) -> TierReport:
        below = self._below.store.report()
        blocks = self._blocks
        return below._replace(
            host="stopped" if blocks.is_stopped else "open",
            host_blocks=len(blocks),
            host_bytes=len(blocks) * blocks.block_bytes,
            max_host_bytes=blocks.num_blocks * blocks.block_bytes,
            host_read_bytes=self._read_bytes,
            host_written_bytes=self._written_bytes,
            host_dropped_blocks=blocks.num_dropped,
            faults=below.faults + self._copier.num_faults,
        )

    def _enter(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, *, is_read: bool
    ) -> HostJob:
        blocks = self._blocks
        keys = list(blocks.chain.keys(key))[start // blocks.block_len :]
        now = time.monotonic()
        job = HostJob(ticket, blocks.generation, key, start, pages, is_read, now, keys)
        self._jobs[ticket] = job
        return job

    # Ends of transfers

    def _end_read(self, copied: CopiedJob) -> Landed:
        job = copied.job
        del self._jobs[job.ticket]
        self._blocks.let_go(job.in_use)
        self._learn(copied)
        self._read_bytes += copied.num_blocks * self._blocks.block_bytes
        num_tokens = copied.num_blocks * self._blocks.block_len
        num_here = max(num_tokens - job.num_below, 0)
        seconds = time.monotonic() - job.asked_s
        return Landed(job.ticket, num_tokens, seconds, num_from_host=num_here)

    def _end_write(self, copied: CopiedJob) -> int:
        """Returns the number of written bytes."""
        job = copied.job
        blocks = self._blocks
        num_copied = copied.num_blocks
        if job.is_cancelled:
            num_copied = 0  # the pages were no longer its own
        num_added = 0
        for number, places in enumerate(job.new):
            if number >= num_copied:
                blocks.free(places)
            elif blocks.add(job.keys[number], places, job.generation) is not None:
                num_added += 1
        blocks.note_use(list(blocks.chain.keys(job.key)))
        self._learn(copied)
        num_bytes = num_added * blocks.block_bytes
        self._written_bytes += num_bytes
        return num_bytes

    def _tell_written(self, job: HostJob, num_bytes: int, written: list[Written]) -> None:
        del self._jobs[job.ticket]
        if not job.is_cancelled:
            written.append(Written(job.ticket, num_bytes))

    def _write_below(self, job: HostJob, num_bytes: int) -> bool:
        """Let the store below write the part of a sequence that it lacks. Returns whether there is
        such a part; the write is reported only after that."""
        if not self._below.is_there:
            return False
        blocks = self._blocks
        here = blocks.num_here(job.key, 0)
        key = job.key.first(here)
        start = self._below.store.lacks(key).num_tokens
        if start >= here:
            return False
        in_use = blocks.hold(list(blocks.chain.keys(key))[start // blocks.block_len :])
        self._below.write(WriteBelow(job, num_bytes, in_use), key, start)
        return True

    def _take_below(self, written: list[Written]) -> None:
        reads, writes = self._below.take()
        for write in writes:
            self._blocks.let_go(write.blocks)
            self._tell_written(write.job, write.num_bytes, written)
        for read in reads:
            self._came_from_below(read.job, read.num_tokens)

    def _came_from_below(self, job: HostJob, num_tokens: int) -> None:
        """The store below has read `num_tokens` of the tokens that a transfer needs."""
        blocks = self._blocks
        num_blocks = num_tokens // blocks.block_len
        for number, places in enumerate(job.new):
            if number >= num_blocks:
                blocks.free(places)
                continue
            block = blocks.add(job.keys[len(job.in_use)], places, job.generation)
            if block is None:
                num_blocks = number  # later blocks are out of date, too
                continue
            block.users += 1
            job.in_use.append(block)
            job.num_below += blocks.block_len
        blocks.note_use(job.keys)
        job.new = []
        self._copier.give(job)

    def _learn(self, copied: CopiedJob) -> None:
        num_bytes = copied.num_blocks * self._blocks.block_bytes
        if num_bytes:
            rate = num_bytes / max(copied.seconds, 1e-6)
            self._rate += LEARNING_RATE * (rate - self._rate)

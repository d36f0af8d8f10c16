"""The memory of the host behind what `OracleRunner` has for K and V, alone or before a store.

The class that serves (`HostTiers`) keeps the books. Its copies are made when a random number says
so, on no thread of their own; meanwhile pages that are read hold rubbish, and pages that are
written must hold what their tokens say.
"""

from __future__ import annotations

import random

import numpy as np

from tests.scheduler.cache_check import states_of
from tests.scheduler.oracle_runner import OracleRunner
from tests.scheduler.tier_oracle import RUBBISH, OracleTiers
from weft.arrays import IntArray, LongArray
from weft.memory.allocator import slots_of
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import TierNews
from weft.tiers.host.copier import HostJob
from weft.tiers.host.store import HostTiers


class CopyFailed(Exception):
    """A copy that is to fail."""


class OracleCopies:
    """Host memory of `num_host_pages` pages."""

    def __init__(self, num_host_pages: int, page_size: int, seed: str) -> None:
        self.num_host_pages = num_host_pages
        self.page_bytes = page_size  # so that bytes are tokens
        self._page_size = page_size
        self._rng = random.Random(f"copies {seed}")
        self.fails = True  # now and then
        self.state: LongArray = np.full(num_host_pages * page_size, RUBBISH, dtype=np.int64)
        self.runner: OracleRunner | None = None

    def save(self, pages: IntArray, places: IntArray) -> None:
        self._maybe_fail()
        assert self.runner is not None
        self.state[self._slots(places)] = self.runner.state[self._slots(pages)]

    def load(self, places: IntArray, pages: IntArray) -> None:
        self._maybe_fail()
        assert self.runner is not None
        self.runner.state[self._slots(pages)] = self.state[self._slots(places)]

    def _maybe_fail(self) -> None:
        if self.fails and self._rng.random() < 0.03:
            raise CopyFailed

    def _slots(self, pages: IntArray) -> IntArray:
        return slots_of(pages, self._page_size)


class OracleHost(HostTiers):
    """`pace`: how likely the next copy is made in a turn; `below` may be a store with `copies` as
    its memory."""

    def __init__(
        self,
        copies: OracleCopies,
        block_len: int,
        page_size: int,
        pace: float,
        seed: str,
        below: OracleTiers | None,
    ) -> None:
        super().__init__(
            copies, page_size=page_size, block_len=block_len, notify=lambda: None, below=below
        )
        self._of_pool = copies
        self._store = below
        self._page_size = page_size
        self._pace = pace
        self._rng = random.Random(f"host {seed}")

    @property
    def runner(self) -> OracleRunner:
        assert self._of_pool.runner is not None
        return self._of_pool.runner

    @runner.setter
    def runner(self, runner: OracleRunner) -> None:
        self._of_pool.runner = runner
        if self._store is not None:
            self._store.runner = runner

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        super().fetch(ticket, key, start, pages, resume_state)
        self._look_at_jobs()

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        slots = slots_of(pages, self._page_size)
        expected = states_of(self.runner, key)[start:]
        assert self.runner.state[slots].tolist() == expected, "a page is not what its key says"
        super().keep(ticket, key, start, pages, resume_state)

    def take(self) -> TierNews:
        self._look_at_jobs()
        while self._copier.waiting.qsize() and self._rng.random() < self._pace:
            self._copy_next()
        return super().take()

    def settle(self) -> None:
        if self._store is not None:
            self._store.let_all_end()
        while self._jobs:
            for ticket in list(self._jobs):
                self.cancel(ticket)
            while self._copier.waiting.qsize():
                self._copy_next()
            super().take()
        super().settle()

    # Numbers as those of `OracleTiers`

    @property
    def num_read(self) -> int:
        return self._read_bytes + (self._store.num_read if self._store else 0)

    @property
    def num_written(self) -> int:
        return self._written_bytes + (self._store.num_written if self._store else 0)

    @property
    def num_faults(self) -> int:
        return self._copier.num_faults + (self._store.num_faults if self._store else 0)

    @property
    def num_silent(self) -> int:
        return self._store.num_silent if self._store else 0

    def let_all_end(self) -> None:
        self._pace = 0.9
        if self._store is not None:
            self._store.let_all_end()

    def check_places(self) -> None:
        """Each place is free, or a block's, or on its way, once."""
        owned = [*self._blocks.unused, *(block.places for block in self._blocks.by_key.values())]
        dropped = {
            id(block): block.places
            for blocks in [job.in_use for job in self._jobs.values()]
            + [below.blocks for below in self._below.writes.values()]
            for block in blocks
            if block.is_dropped
        }
        owned += dropped.values()
        for job in self._jobs.values():
            if job.is_read or not self._is_added(job):
                owned += job.new
        places = np.concatenate(owned)
        assert (
            len(places)
            == len(np.unique(places))
            == self._blocks.num_blocks * self._blocks.block_pages
        )

    def _is_added(self, job: HostJob) -> bool:
        """Whether what a job writes is in the index already, and on its way to the store below."""
        return any(below.job is job for below in self._below.writes.values())

    def _copy_next(self) -> None:
        job = self._copier.waiting.get()
        assert job is not None
        self._copier.work_on(job)

    def _look_at_jobs(self) -> None:
        """A copy may be made at any time."""
        pending = self.runner.pending
        for job in self._jobs.values():
            slots = slots_of(job.pages, self._page_size)
            if job.is_read and not self._is_copied(job):
                assert not any(np.isin(step.plan.slots, slots).any() for step in pending)
                self.runner.state[slots] = RUBBISH

    def _is_copied(self, job: HostJob) -> bool:
        return any(copied.job is job for copied in self._copier.done)

"""A store of what `OracleRunner` has for K and V, which answers late, in part, wrongly or never.

It looks that nobody touches what is on its way: pages that are read hold rubbish until they have landed, and pages that
are written still hold at the end what their tokens say, unless the write was cancelled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.scheduler.cache_check import states_of
from tests.scheduler.oracle_runner import OracleRunner
from weft.arrays import IntArray
from weft.memory.allocator import slots_of
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    Landed,
    NoTiers,
    Sought,
    TierNews,
    Written,
)

RUBBISH = -77

# States by weights, namespace and all tokens up to the end.
Blocks = dict[tuple[int, str, bytes], list[int]]


@dataclass
class Job:
    ticket: int
    key: CacheKey
    start: int
    pages: IntArray
    is_read: bool
    turns: float  # until it ends, in calls of `take`
    weights: int
    is_cancelled: bool = False


class OracleTiers(NoTiers):
    """`blocks` may be those that another world has left. `mood`: how it behaves."""

    def __init__(
        self, blocks: Blocks, block_len: int, page_size: int, mood: str, seed: str
    ) -> None:
        self.blocks = blocks
        self.block_len = block_len
        self.page_size = page_size
        self.mood = mood
        self.rng = random.Random(seed)
        self.runner: OracleRunner | None = None
        self.jobs: dict[int, Job] = {}
        self.turns_to_open = self.rng.choice([0, 1, 10])
        self.weights = 0  # those that it stores for
        self.is_stopped = False
        self.num_read = 0
        self.num_written = 0
        self.num_faults = 0
        self.num_silent = 0

    def seek(self, id: int, key: CacheKey, have: int) -> Sought:
        assert self.turns_to_open < 0, "it is asked before it has opened"
        num_tokens = self._stored(key)
        if self.is_stopped or num_tokens <= have:
            return NOT_STORED
        return Sought(num_tokens, self.rng.choice([0.0, 0.0, 1.0, 5.0]))

    def lacks(self, key: CacheKey) -> int:
        return self._stored(key)

    def _stored(self, key: CacheKey) -> int:
        num_tokens = 0
        while (end := num_tokens + self.block_len) <= len(key.tokens) // TOKEN_BYTES:
            name = self.weights, key.namespace, key.tokens[: end * TOKEN_BYTES]
            if name not in self.blocks:
                break
            num_tokens = end
        return num_tokens

    def fetch(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        assert len(pages) * self.page_size == len(key.tokens) // TOKEN_BYTES - start
        self.jobs[ticket] = Job(ticket, key, start, pages.copy(), True, self._turns(), self.weights)
        self._spoil(self.jobs[ticket])

    def keep(self, ticket: int, key: CacheKey, start: int, pages: IntArray) -> None:
        assert len(pages) * self.page_size == len(key.tokens) // TOKEN_BYTES - start
        self.jobs[ticket] = Job(
            ticket, key, start, pages.copy(), False, self._turns(), self.weights
        )
        self._look_at(self.jobs[ticket])

    def cancel(self, ticket: int) -> None:
        job = self.jobs[ticket]
        job.is_cancelled = True
        if not job.is_read:
            del self.jobs[ticket]
        elif job.turns != float("inf"):
            job.turns = self.rng.choice([0, 1, 3])

    def clear(self) -> None:
        self.blocks.clear()

    def renew(self, why: str) -> None:
        assert self.runner is not None
        self.weights = self.runner.weights
        self.turns_to_open = self.rng.choice([0, 1, 10])

    def stop(self, why: str) -> None:
        self.is_stopped = True

    def _turns(self) -> float:
        match self.mood:
            case "quick":
                return self.rng.choice([0, 1])
            case "slow":
                return self.rng.choice([1, 5, 20])
            case "silent":
                return float("inf")
        turns = self.rng.choice([0, 3, 20, 100, float("inf")])
        self.num_silent += turns == float("inf")
        return turns

    def take(self) -> TierNews:
        self.turns_to_open -= 1
        landed: list[Landed] = []
        written: list[Written] = []
        for job in list(self.jobs.values()):
            self._spoil(job) if job.is_read else self._look_at(job)
            job.turns -= 1
            if job.turns >= 0:
                continue
            del self.jobs[job.ticket]
            if job.is_read:
                landed.append(Landed(job.ticket, self._read(job), 0.0))
            else:
                written.append(Written(job.ticket, self._write(job)))
        news = TierNews(tuple(landed), tuple(written), self.turns_to_open == -1)
        return NO_NEWS if news == NO_NEWS else news

    def let_all_end(self) -> None:
        self.mood = "quick"
        for job in self.jobs.values():
            job.turns = 0

    # What it does with memory

    def _slots(self, job: Job) -> IntArray:
        return slots_of(job.pages, self.page_size)

    def _spoil(self, job: Job) -> None:
        """A thread may write into the pages at any time."""
        assert self.runner is not None
        slots = self._slots(job)
        pending = self.runner.pending
        assert not any(np.isin(step.plan.slots, slots).any() for step in pending)
        self.runner.state[slots] = RUBBISH

    def _look_at(self, job: Job) -> None:
        assert self.runner is not None
        found = self.runner.state[self._slots(job)].tolist()
        assert found == states_of(self.runner, job.key)[job.start :], (
            "pages changed while they were written"
        )

    def _read(self, job: Job) -> int:
        assert self.runner is not None
        num_tokens = 0
        slots = self._slots(job)
        while (at := job.start + num_tokens) < len(job.key.tokens) // TOKEN_BYTES:
            if job.is_cancelled and self.rng.random() < 0.7:
                break
            if self.mood != "quick" and self.rng.random() < 0.1:
                self.num_faults += 1
                break
            tokens = job.key.tokens[: (at + self.block_len) * TOKEN_BYTES]
            name = job.weights, job.key.namespace, tokens
            if name not in self.blocks:
                break
            here = slots[num_tokens : num_tokens + self.block_len]
            self.runner.state[here] = self.blocks[name]
            num_tokens += self.block_len
        self.num_read += num_tokens
        return num_tokens

    def _write(self, job: Job) -> int:
        states = states_of(self.runner, job.key)
        num_bytes = 0
        for end in range(job.start + self.block_len, len(states) + 1, self.block_len):
            if self.mood != "quick" and self.rng.random() < 0.1:
                self.num_faults += 1
                break
            name = job.weights, job.key.namespace, job.key.tokens[: end * TOKEN_BYTES]
            self.blocks[name] = states[end - self.block_len : end]
            num_bytes += self.block_len
        self.num_written += num_bytes
        return num_bytes

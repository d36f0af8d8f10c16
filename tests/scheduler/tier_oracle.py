"""A store of what `OracleRunner` has for K and V, which answers late, in part, wrongly or never.

It looks that nobody touches what is on its way: pages that are read hold rubbish until they have
landed, and pages that are written still hold at the end what their tokens say, unless the write was
cancelled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.scheduler.cache_check import resume_state_memory, states_of
from tests.scheduler.oracle_runner import OracleRunner
from weft.arrays import IntArray, LongArray
from weft.memory.allocator import slots_of
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    Landed,
    NoTiers,
    Present,
    Sought,
    TierNews,
    Written,
)

RUBBISH = -77

# States by weights, namespace and all tokens up to the end; what resume states have by "resume state" and the
# same.
Blocks = dict[tuple[object, ...], list[int]]


@dataclass
class Job:
    ticket: int
    key: CacheKey
    start: int
    pages: IntArray
    is_read: bool
    turns: float  # until it ends, in calls of `take`
    weights: int
    resume_state: IntArray
    is_cancelled: bool = False
    has_resume_state: bool = False


class OracleTiers(NoTiers):
    """`blocks` may be those that another world has left. `mood`: how it behaves. `memory`: what it
    reads and writes, if that is not the pool; then nobody asks whether it has opened."""

    def __init__(
        self,
        blocks: Blocks,
        block_len: int,
        page_size: int,
        mood: str,
        seed: str,
        memory: LongArray | None = None,
    ) -> None:
        self._memory = memory
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
        self.num_resume_states = 0  # that were read

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        has_opened = self.turns_to_open < 0
        assert has_opened or self._memory is not None, "it is asked before it has opened"
        if not has_opened:
            return NOT_STORED
        num_tokens = self._resumable(key, have)
        if self.is_stopped or num_tokens <= since:
            return NOT_STORED
        return Sought(num_tokens, self.rng.choice([0.0, 0.0, 1.0, 5.0]))

    def lacks(self, key: CacheKey) -> Present:
        num_tokens = self._stored(key)
        can_resume = (
            not self._has_resume_states or self._resume_state(key, num_tokens) in self.blocks
        )
        return Present(num_tokens, can_resume)

    @property
    def _has_resume_states(self) -> bool:
        assert self.runner is not None
        return self.runner.windows is not None or self.runner.states is not None

    def _resume_state(self, key: CacheKey, end: int) -> tuple[object, ...]:
        return "resume_state", self.weights, key.namespace, key.tokens[: end * TOKEN_BYTES]

    def _stored(self, key: CacheKey, have: int = 0) -> int:
        num_tokens = 0
        while (end := num_tokens + self.block_len) <= len(key.tokens) // TOKEN_BYTES:
            name = self.weights, key.namespace, key.tokens[: end * TOKEN_BYTES]
            if name not in self.blocks and end > have:
                break
            num_tokens = end
        return num_tokens

    def _resumable(self, key: CacheKey, have: int) -> int:
        end = self._stored(key, have)
        while self._has_resume_states and end and self._resume_state(key, end) not in self.blocks:
            end -= self.block_len
        return end

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self.jobs[ticket] = self._job(ticket, key, start, pages, resume_state, is_read=True)
        self._spoil(self.jobs[ticket])

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self.jobs[ticket] = self._job(ticket, key, start, pages, resume_state, is_read=False)
        self._look_at(self.jobs[ticket])

    def _job(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray,
        *,
        is_read: bool,
    ) -> Job:
        assert len(pages) * self.page_size == len(key.tokens) // TOKEN_BYTES - start
        assert self._has_resume_states or not len(resume_state)
        turns = self._turns()
        return Job(
            ticket, key, start, pages.copy(), is_read, turns, self.weights, resume_state.copy()
        )

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
                landed.append(Landed(job.ticket, self._read(job), 0.0, job.has_resume_state))
            else:
                written.append(Written(job.ticket, self._write(job)))
        news = TierNews(tuple(landed), tuple(written), self.turns_to_open == -1)
        return NO_NEWS if news == NO_NEWS else news

    def let_all_end(self) -> None:
        self.mood = "quick"
        for job in self.jobs.values():
            job.turns = 0

    # What it does with memory

    @property
    def memory(self) -> LongArray:
        """What is moved: the states of all slots."""
        if self._memory is not None:
            return self._memory
        assert self.runner is not None
        return self.runner.state

    def _slots(self, job: Job) -> IntArray:
        return slots_of(job.pages, self.page_size)

    def _spoil(self, job: Job) -> None:
        """A thread may write into the pages at any time."""
        assert self.runner is not None
        slots = self._slots(job)
        pending = self.runner.pending
        is_pool = self._memory is None
        assert not any(np.isin(step.plan.slots, slots).any() for step in pending if is_pool)
        self.memory[slots] = RUBBISH
        if len(job.resume_state):
            memory, places = self._resume_state_memory(job)
            memory[places] = RUBBISH

    def _look_at(self, job: Job) -> None:
        assert self.runner is not None
        found = self.memory[self._slots(job)].tolist()
        states = states_of(self.runner, job.key)
        assert found == states[job.start :], "pages changed while they were written"
        if len(job.resume_state):
            memory, places = self._resume_state_memory(job)
            assert memory[places].tolist() == states[-len(places) :], "a resume state is another's"

    def _resume_state_memory(self, job: Job) -> tuple[LongArray, IntArray]:
        """The memory of resume states, and where in it that of a transfer is."""
        assert self.runner is not None
        return resume_state_memory(self.runner, job.resume_state, self.page_size)

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
            self.memory[here] = self.blocks[name]
            num_tokens += self.block_len
        self.num_read += num_tokens
        is_whole = job.start + num_tokens == len(job.key.tokens) // TOKEN_BYTES
        name = self._resume_state(job.key, job.start + num_tokens)
        if (
            is_whole
            and len(job.resume_state)
            and job.weights == self.weights
            and name in self.blocks
        ):
            memory, places = self._resume_state_memory(job)
            memory[places] = self.blocks[name]
            job.has_resume_state = True
            self.num_resume_states += 1
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
        else:
            if len(job.resume_state) and job.weights == self.weights:
                _, places = self._resume_state_memory(job)
                self.blocks[self._resume_state(job.key, len(states))] = states[-len(places) :]
                num_bytes += 1
        self.num_written += num_bytes
        return num_bytes

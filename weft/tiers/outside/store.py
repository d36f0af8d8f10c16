"""KV in a store from outside: the `Tiers` around a `BlockStore`.

    engine's thread   seek, lacks: the keys in memory       fetch, keep, cancel ─▶ queues ─┐
    reading thread    get ─▶ compare the block ─▶ copy it into the pool's pages ◀──────────┤
    writing thread    first the fingerprint and the keys; then put, clear ◀────────────────┘

Blocks are those of `tiers/disk/files.py`, with key, tokens and checksum: what the store gives back
is compared before the pool sees it, so a wrong block is one that is missing. The pool's memory is
never in the hands of the store: a read that is cancelled ends at once, whatever the store does.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    Present,
    Sought,
    TierNews,
    TierReport,
)
from weft.observe.log import EventLog
from weft.observe.survivable import survived
from weft.tiers.disk.files import DamagedBlock, block_bytes, copy_block
from weft.tiers.disk.jobs import BlockMemory, Jobs, StoredPart, TransferJob
from weft.tiers.disk.lookup import Lookup
from weft.tiers.disk.opening import Opening, Reopen
from weft.tiers.disk.writer import REST_S, rest_s
from weft.tiers.outside.block_store import BlockStore
from weft.tiers.pages import PoolPages

T = TypeVar("T")
FIRST_RATE = 500e6  # bytes per second, until a rate is measured
LEARNING_RATE = 0.3
KEY_BYTES = 32
MAX_KEYS = 1_000_000  # of `BlockStore.keys`, which may have no end
SLOW_S = 5.0  # nothing is looked for while a call of the store takes longer

log = EventLog("cache")


class Clear(NamedTuple):
    """A job of the writing thread: forget all blocks."""


class OutsideTiers:
    """`own`: the store, with the `name` that users read. The other arguments are those of
    `DiskTiers`."""

    def __init__(
        self,
        own: BlockStore,
        name: str,
        pool: PoolPages,
        *,
        page_size: int,
        block_len: int,
        weights: Callable[[], Callable[[], bytes]],
        notify: Callable[[], None],
        resume_states: PoolPages | None = None,
    ) -> None:
        self._own = own
        self._name = name
        self._memory = BlockMemory(
            pool=pool, page_size=page_size, block_len=block_len, resume_states=resume_states
        )
        self._notify = notify
        self._jobs = Jobs(notify)
        self._opening = Opening(weights, block_len, notify)
        self._known: set[bytes] = set()  # keys of blocks that should be there
        self._lookup = Lookup(self._opening, self._memory, self._known)
        self._reads = Reads(own, self._known, self._memory, self._jobs, self._opening)
        self._writes = Writes(own, self._known, self._memory, self._jobs, self._opening)

    def start(self) -> None:
        """Start the threads and ask for the stored blocks."""
        self._writes.queue.put(self._opening.first())
        self._reads.start()
        self._writes.start()

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        if self._reads.is_slow:
            return NOT_STORED
        num_tokens = self._lookup.resumable(key, have)
        if num_tokens <= since:
            return NOT_STORED
        num_pages = max(num_tokens - have, 0) / self._memory.page_size + self._jobs.num_pages()
        return Sought(num_tokens, num_pages * self._memory.pool.page_bytes / self._reads.rate)

    def lacks(self, key: CacheKey) -> Present:
        return self._lookup.present(key)

    def fetch(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        self._reads.queue.put(
            self._jobs.enter(self._opening.chain, ticket, key, start, pages, resume_state)
        )

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        job = self._jobs.enter(self._opening.chain, ticket, key, start, pages, resume_state)
        job.is_read = False
        self._writes.queue.put(job)

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket, at_once=True)

    def take(self) -> TierNews:
        self._writes.turned_s = time.monotonic()
        if not self._jobs.has_news and not self._opening.has_opened:
            return NO_NEWS
        return self._jobs.take()._replace(has_opened=self._opening.take())

    def clear(self) -> None:
        self._known.clear()
        self._writes.queue.put(Clear())

    def flush(self) -> None:
        """Does nothing: nothing is in memory."""

    def renew(self, why: str) -> None:
        self._writes.queue.put(self._opening.renew(why))

    def stop(self, why: str) -> None:
        self._opening.stop(why)

    def close(self) -> None:
        self._reads.queue.put(None)
        self._writes.queue.put(None)

    def settle(self) -> None:
        self._jobs.settle(at_once=True)
        self._opening.tell_again()
        self._notify()

    def report(self) -> TierReport:
        state = self._opening.state
        if state == "open" and self._reads.is_slow:
            state = "the store does not answer"
        return TierReport(
            state=state,
            folder=self._name,
            num_blocks=0 if self._opening.chain is None else len(self._known),
            read_bytes=self._reads.num_bytes,
            written_bytes=self._writes.num_bytes,
            faults=self._jobs.num_faults,
        )


class Reads:
    """The thread that calls `get`."""

    def __init__(
        self,
        own: BlockStore,
        known: set[bytes],
        memory: BlockMemory,
        jobs: Jobs,
        opening: Opening,
    ) -> None:
        self._own = own
        self._known = known
        self._memory = memory
        self._jobs = jobs
        self._opening = opening
        self._called_s = math.inf  # when the call of the store began that has not ended
        self.queue: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()
        self.rate = FIRST_RATE
        self.num_bytes = 0  # that were read since the start

    def start(self) -> None:
        threading.Thread(target=self._run, name="weft-cache-reads", daemon=True).start()

    @property
    def is_slow(self) -> bool:
        return time.monotonic() > self._called_s + SLOW_S

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            num_tokens = 0
            try:
                num_tokens = self._read(job)
            except BaseException as exc:  # after any error the request computes its prompt
                self._jobs.failed("read", survived(exc))
            self._jobs.end_read(job, num_tokens)

    def _read(self, job: TransferJob) -> int:
        """Returns the number of tokens that were read."""
        chain = job.chain
        if chain is None or self._opening.is_stopped:
            return 0
        num_tokens = 0
        for part in self._memory.parts(chain, job):
            if job.is_cancelled or not self._read_block(job, part):
                break
            num_tokens += part.num_tokens
            job.has_read(part.num_tokens)
        return num_tokens

    def _read_block(self, job: TransferJob, part: StoredPart) -> bool:
        """Whether the block is in the pool now."""
        began_s = time.monotonic()
        try:
            block = self._get(part.key)
            if block is None:
                self._known.discard(part.key)
                return False
            copy = partial(copy_block, block, part.key, part.tokens, part.pieces)
            is_copied = self._jobs.while_owned(job, copy)
        except BaseException as exc:
            self._known.discard(part.key)
            self._jobs.failed("read", survived(exc))
            return False
        if is_copied:
            self.num_bytes += len(block)
            rate = len(block) / max(time.monotonic() - began_s, 1e-6)
            self.rate += LEARNING_RATE * (rate - self.rate)
        return is_copied

    def _get(self, key: bytes) -> bytes | None:
        """Raises DamagedBlock for what is no block, and whatever the store raises."""
        self._called_s = time.monotonic()
        try:
            block = self._own.get(key)
        finally:
            self._called_s = math.inf
        if block is not None and not isinstance(block, bytes):
            raise DamagedBlock(f"the store gave {type(block).__name__} instead of bytes")
        return block


class Writes:
    """The thread that calls `keys`, `put` and `clear`."""

    def __init__(
        self,
        own: BlockStore,
        known: set[bytes],
        memory: BlockMemory,
        jobs: Jobs,
        opening: Opening,
    ) -> None:
        self._own = own
        self._known = known
        self._memory = memory
        self._jobs = jobs
        self._opening = opening
        self.queue: queue.SimpleQueue[TransferJob | Reopen | Clear | None] = queue.SimpleQueue()
        self.turned_s = -math.inf  # when the engine last called `take`
        self._rests_until_s = -math.inf
        self.num_bytes = 0  # that were written since the start

    def start(self) -> None:
        threading.Thread(target=self._run, name="weft-cache-writes", daemon=True).start()

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            if isinstance(job, Reopen):
                self._open(job)
            elif isinstance(job, Clear):
                self._guarded("clear", self._own.clear, None)
            else:
                num_bytes = self._guarded("write", partial(self._write, job), 0)
                self._jobs.end_write(job, num_bytes)

    def _guarded(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of `work`; `otherwise` if it raises, and then nothing is written for a
        while."""
        try:
            return work()
        except BaseException as exc:
            self._rests_until_s = time.monotonic() + REST_S
            self._jobs.failed(what, survived(exc))
            return otherwise

    def _open(self, asked: Reopen) -> None:
        """Compute the fingerprint of the weights, and find the stored blocks."""
        chain = self._opening.chain_of(asked)
        if chain is None:
            return
        self._known.update(self._guarded("list", lambda: _keys(self._own.keys()), []))
        if self._opening.opened(asked, chain):
            log.info("opened", model=chain.model, blocks=len(self._known))

    def _write(self, job: TransferJob) -> int:
        """Returns the number of written bytes."""
        chain = job.chain
        if chain is None or self._opening.is_stopped or time.monotonic() < self._rests_until_s:
            return 0
        total = 0
        for part in self._memory.parts(chain, job):
            if part.key in self._known:
                continue
            began_s = time.monotonic()
            block = block_bytes(part.key, part.tokens, part.pieces)
            if not self._jobs.is_complete(job):
                break  # the pages may have changed while they were copied
            self._own.put(part.key, block)
            self._known.add(part.key)
            total += len(block)
            self.num_bytes += len(block)
            ended_s = time.monotonic()
            time.sleep(rest_s(ended_s - began_s, ended_s - self.turned_s))
        return total


def _keys(found: Iterable[bytes]) -> list[bytes]:
    """The keys among what `BlockStore.keys` gives. Raises TypeError."""
    keys = list(islice(found, MAX_KEYS))
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise TypeError(f"{key!r:.80} is no key: {KEY_BYTES} bytes are expected")
    return keys

"""KV in the files of a folder: the `Tiers` of `--cache-dir`, as the engine's thread sees them.

    engine's thread   seek, lacks: the index in memory       fetch, keep, cancel ─▶ queues ─┐
    reading thread    block after block, straight into the pool's pages ◀───────────────────┤
    checking thread   the checksum of a block, while the next one is being read             │
    writing thread    first the fingerprint and a scan; then block after block ◀────────────┘

A block that cannot be read is dropped from the index, and its tokens are computed; one that
cannot be written is not stored. After a failed write, nothing is written for a minute. The
files take at most `max_bytes`: the least recently used are deleted. Nothing is written to a
file system with little free space.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

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
from weft.tiers.disk.index import BlockIndex
from weft.tiers.disk.jobs import BlockMemory, Jobs
from weft.tiers.disk.lookup import Lookup
from weft.tiers.disk.opening import Opening
from weft.tiers.disk.reader import BlockReader
from weft.tiers.disk.writer import FLOOR_BYTES, BlockWriter
from weft.tiers.pages import PoolPages


class DiskTiers:
    """`weights` is called on the engine's thread, once for each set of weights, and returns a
    function that computes their fingerprint on another thread. `notify` is called when there is
    news, on any thread. `folder` must exist. `resume_states`: the memory of resume states, if
    sequences have some; None: they can be resumed after every block."""

    def __init__(
        self,
        folder: Path,
        pool: PoolPages,
        *,
        page_size: int,
        block_len: int,
        max_bytes: int,
        weights: Callable[[], Callable[[], bytes]],
        notify: Callable[[], None],
        floor_bytes: int = FLOOR_BYTES,
        resume_states: PoolPages | None = None,
    ) -> None:
        self._index = BlockIndex(folder)
        self._memory = BlockMemory(
            pool=pool, page_size=page_size, block_len=block_len, resume_states=resume_states
        )
        self._max_bytes = max_bytes
        self._notify = notify
        self._jobs = Jobs(notify)
        self._opening = Opening(weights, block_len, notify)
        self._lookup = Lookup(self._opening, self._memory, self._index)
        self._reader = BlockReader(self._index, self._memory, self._jobs, self._opening)
        self._writer = BlockWriter(
            self._index,
            self._memory,
            self._jobs,
            self._opening,
            max_bytes=max_bytes,
            floor_bytes=floor_bytes,
        )

    def start(self) -> None:
        """Start the threads and look for stored blocks."""
        self._writer.do(self._opening.first())
        self._reader.start()
        self._writer.start()

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        self._writer.was_asked = True
        num_tokens = self._lookup.resumable(key, have)
        if num_tokens <= since:
            return NOT_STORED
        num_pages = max(num_tokens - have, 0) / self._memory.page_size + self._jobs.num_pages()
        num_bytes = num_pages * self._memory.pool.page_bytes
        return Sought(num_tokens, num_bytes / self._reader.rate)

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
        chain = self._opening.chain
        self._reader.read(self._jobs.enter(chain, ticket, key, start, pages, resume_state))

    def keep(
        self,
        ticket: int,
        key: CacheKey,
        start: int,
        pages: IntArray,
        resume_state: IntArray = NO_PAGES,
    ) -> None:
        chain = self._opening.chain
        self._writer.do(self._jobs.enter(chain, ticket, key, start, pages, resume_state))

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket)

    def take(self) -> TierNews:
        self._writer.turned_s = time.monotonic()
        if not self._jobs.has_news and not self._opening.has_opened:
            return NO_NEWS
        return self._jobs.take()._replace(has_opened=self._opening.take())

    def clear(self) -> None:
        self._writer.do(self._index.drop_all())

    def flush(self) -> None:
        """Does nothing: everything that is stored is in files."""

    def renew(self, why: str) -> None:
        self._writer.do(self._opening.renew(why))

    def stop(self, why: str) -> None:
        self._opening.stop(why)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def settle(self) -> None:
        self._jobs.settle()
        self._opening.tell_again()
        self._notify()

    def report(self) -> TierReport:
        chain = self._opening.chain
        return TierReport(
            state=self._opening.state,
            folder=str(self._index.folder),
            num_blocks=0 if chain is None else self._index.num_of(chain.model),
            num_bytes=self._index.num_bytes,
            max_bytes=self._max_bytes,
            read_bytes=self._reader.num_bytes,
            written_bytes=self._writer.num_bytes,
            dropped_blocks=self._writer.num_dropped,
            faults=self._jobs.num_faults,
        )

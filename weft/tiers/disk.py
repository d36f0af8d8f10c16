"""KV in the files of a folder: the `Tiers` of `--cache-dir`.

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

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.prefix_cache import NO_PAGES, CacheKey
from weft.memory.tiers.protocol import (
    NO_NEWS,
    NOT_STORED,
    NOTHING_PRESENT,
    Landed,
    Present,
    Sought,
    TierNews,
    TierReport,
    Written,
)
from weft.observe.log import EventLog
from weft.tiers.files import DamagedBlock, file_bytes, read_block, write_block
from weft.tiers.index import BlockIndex
from weft.tiers.keys import KeyChain

FIRST_RATE = 500e6  # bytes per second, until a rate is measured
LEARNING_RATE = 0.3
FLOOR_BYTES = 1_000_000_000  # free space that must remain on the file system
REST_S = 60.0  # pause after a failed write
# Other servers may share the folder, so it is scanned after this time while the store is used, and
# whenever this server has written a sixteenth of the allowed bytes.
LOOK_S = 60.0
WRITTEN_SHARE = 16
SETTLE_S = 10.0
# While requests run, the writing thread rests after each block for this multiple of the block's
# time, because it uses their processor time. If the engine runs no steps, it does not rest.
REST_SHARE = 9.0
LONGEST_REST_S = 0.02
IDLE_S = 0.2
OPENING = "the stored blocks are being listed"

log = EventLog("cache")


class PoolPages(Protocol):
    """The memory of the KV pool, page by page."""

    page_bytes: int

    def pieces(self, page: int) -> list[memoryview]:
        """The memory of a page, one piece for each tensor."""
        ...


@dataclass(eq=False)
class TransferJob:
    """A transfer, as a job for a thread."""

    ticket: int
    chain: KeyChain | None  # the keys of its blocks; None: the store is not open
    key: CacheKey
    start: int
    pages: IntArray
    ending: IntArray  # empty: no ending is transferred
    asked_s: float
    has_ending: bool = False  # the ending has been read
    is_cancelled: bool = False


class StoredPart(NamedTuple):
    """A block of a transfer, or its ending."""

    key: bytes
    tokens: bytes  # of the block, or of the block before the ending
    pieces: list[memoryview]
    num_tokens: int  # 0: this is an ending


class UncheckedBlock(NamedTuple):
    """A block that has been read and is being checked."""

    key: bytes
    path: Path
    num_bytes: int
    num_tokens: int  # 0: this is an ending
    check: Future[None]  # raises DamagedBlock


class Reopen(NamedTuple):
    """The weights have changed: find the stored blocks of the new weights."""

    number: int  # of the weights
    identify: Callable[[], bytes]


class DiskTiers:
    """`weights` is called on the engine's thread, once for each set of weights, and returns a
    function that computes their fingerprint on another thread. `notify` is called when there is
    news, on any thread. `folder` must exist. `endings`: the memory of endings, if sequences have
    some; None: they can be resumed after every block."""

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
        endings: PoolPages | None = None,
    ) -> None:
        self._index = BlockIndex(folder)
        self._pool = pool
        self._endings = endings
        self._page_size = page_size
        self._block_len = block_len
        self._max_bytes = max_bytes
        self._weights = weights
        self._num_renewed = 0
        self._notify = notify
        self._floor_bytes = floor_bytes
        self._chain: KeyChain | None = None  # None: no block is found
        self._state = OPENING
        self._is_stopped = False
        self._jobs: dict[int, TransferJob] = {}  # jobs that have not been reported
        # Protects data that threads write and the engine reads: jobs, news, numbers.
        self._lock = threading.Condition()
        self._landed: list[Landed] = []
        self._written_jobs: list[Written] = []
        self._has_opened = False
        self._has_news = False
        self._rate = FIRST_RATE
        self._read_bytes = 0
        self._written_bytes = 0
        self._dropped_blocks = 0
        self._faults = 0
        self._rests_until_s = -math.inf
        self._reads: queue.SimpleQueue[TransferJob] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[TransferJob | Reopen | list[Path]] = queue.SimpleQueue()
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="weft-cache-checks")
        self._scanned_s = -math.inf  # when the folder was scanned last
        self._scanned_at_bytes = 0  # bytes written before the last scan
        self._was_asked = False  # since the last scan
        self._turned_s = -math.inf  # when the engine last called `take`

    def start(self) -> None:
        """Start the threads and look for stored blocks."""
        self._writes.put(Reopen(0, self._weights()))
        for name, work in (("reads", self._read_all), ("writes", self._write_all)):
            threading.Thread(target=work, name=f"weft-cache-{name}", daemon=True).start()

    # Called by the engine

    def seek(self, id: int, key: CacheKey, have: int, since: int) -> Sought:
        self._was_asked = True
        num_tokens = self._resumable(key, have)
        if num_tokens <= since:
            return NOT_STORED
        num_bytes = max(num_tokens - have, 0) * self._pool.page_bytes / self._page_size
        with self._lock:
            for job in self._jobs.values():
                num_bytes += len(job.pages) * self._pool.page_bytes
            return Sought(num_tokens, num_bytes / self._rate)

    def lacks(self, key: CacheKey) -> Present:
        chain = self._chain
        if chain is None:
            return NOTHING_PRESENT
        last = b""
        num_tokens = 0
        for one in chain.keys(key):
            if one not in self._index:
                return Present(num_tokens, can_resume=False)
            num_tokens += self._block_len
            last = one
        return Present(num_tokens, self._can_resume(chain, last))

    def fetch(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, ending: IntArray = NO_PAGES
    ) -> None:
        self._reads.put(self._enter(ticket, key, start, pages, ending))

    def keep(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, ending: IntArray = NO_PAGES
    ) -> None:
        self._writes.put(self._enter(ticket, key, start, pages, ending))

    def cancel(self, ticket: int) -> None:
        with self._lock:
            job = self._jobs.get(ticket)
            if job is not None:
                job.is_cancelled = True

    def take(self) -> TierNews:
        self._turned_s = time.monotonic()
        if not self._has_news:
            return NO_NEWS
        with self._lock:
            news = TierNews(tuple(self._landed), tuple(self._written_jobs), self._has_opened)
            self._landed.clear()
            self._written_jobs.clear()
            self._has_opened = False
            self._has_news = False
        return news

    def clear(self) -> None:
        self._writes.put(self._index.drop_all())

    def flush(self) -> None:
        """Does nothing: everything that is stored is in files."""

    def renew(self, why: str) -> None:
        with self._lock:
            self._chain = None
            self._has_opened = False
            self._num_renewed += 1
            if not self._is_stopped:
                self._state = OPENING
        log.info("renewed", reason=why)
        self._writes.put(Reopen(self._num_renewed, self._weights()))

    def stop(self, why: str) -> None:
        with self._lock:
            self._is_stopped = True
            self._chain = None
            self._state = why
        log.warning("stopped", reason=why)

    def settle(self) -> None:
        with self._lock:
            for job in self._jobs.values():
                job.is_cancelled = True
            self._lock.wait_for(lambda: not self._jobs, SETTLE_S)
            self._landed.clear()
            self._written_jobs.clear()
            # A new engine has not been notified of it.
            self._has_opened = self._chain is not None
            self._has_news = self._has_opened
        self._notify()

    def report(self) -> TierReport:
        chain = self._chain
        return TierReport(
            state=self._state,
            folder=str(self._index.folder),
            num_blocks=0 if chain is None else self._index.num_of(chain.model),
            num_bytes=self._index.num_bytes,
            max_bytes=self._max_bytes,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            dropped_blocks=self._dropped_blocks,
            faults=self._faults,
        )

    def _resumable(self, key: CacheKey, have: int) -> int:
        """Number of tokens at the beginning of a sequence that are stored or among the first
        `have`, and after which it can be resumed."""
        chain = self._chain
        if chain is None:
            return 0
        num_tokens = 0
        resumable = 0
        for one in chain.keys(key):
            if num_tokens + self._block_len > have and one not in self._index:
                break
            num_tokens += self._block_len
            if self._can_resume(chain, one):
                resumable = num_tokens
        return resumable

    def _can_resume(self, chain: KeyChain, block: bytes) -> bool:
        """Whether an ending allows to resume a sequence after a block."""
        return self._endings is None or chain.ending(block) in self._index

    def _enter(
        self, ticket: int, key: CacheKey, start: int, pages: IntArray, ending: IntArray
    ) -> TransferJob:
        job = TransferJob(ticket, self._chain, key, start, pages, ending, time.monotonic())
        with self._lock:
            self._jobs[ticket] = job
        return job

    # The reading thread

    def _read_all(self) -> None:
        while True:
            job = self._reads.get()
            num_tokens = 0
            try:
                num_tokens = self._read(job)
            except Exception as exc:  # after any error the request computes its prompt
                self._failed("read", exc)
            with self._lock:
                del self._jobs[job.ticket]
                seconds = time.monotonic() - job.asked_s
                self._landed.append(Landed(job.ticket, num_tokens, seconds, job.has_ending))
            self._tell()

    def _read(self, job: TransferJob) -> int:
        """Returns the number of tokens that were read."""
        chain = job.chain
        if chain is None or self._is_stopped:
            return 0
        num_tokens = 0
        keys: list[bytes] = []
        for block in self._sound_blocks(chain, job):
            num_tokens += block.num_tokens
            keys.append(block.key)
            # The ending comes last, so everything before it has been read.
            job.has_ending = not block.num_tokens
        self._note_use(keys)
        return num_tokens

    def _sound_blocks(self, chain: KeyChain, job: TransferJob) -> Iterator[UncheckedBlock]:
        """The blocks of a transfer, read and checked, up to the first one that fails. While one is
        being read, the one before it is checked."""
        before: UncheckedBlock | None = None
        began_s = time.monotonic()
        is_first = True
        for part in self._parts(chain, job):
            if job.is_cancelled:
                break
            began_s = time.monotonic()
            block = self._read_block(chain, part)
            if before is not None:
                if not self._is_sound(before):
                    return
                self._learn(before.num_bytes, time.monotonic() - began_s)
                is_first = False
                yield before
            before = block
            if before is None:
                return
        if before is not None and self._is_sound(before):
            if is_first:
                self._learn(before.num_bytes, time.monotonic() - began_s)
            yield before

    def _read_block(self, chain: KeyChain, part: StoredPart) -> UncheckedBlock | None:
        """Read a block, and start its check. None if it cannot be read."""
        path = self._index.path(chain.model, part.key)
        try:
            found = read_block(path, part.key, part.tokens, part.pieces)
        except (OSError, DamagedBlock) as exc:
            self._lose(part.key, path, exc)
            return None
        check = self._checks.submit(found.check)
        return UncheckedBlock(part.key, path, found.num_bytes, part.num_tokens, check)

    def _is_sound(self, block: UncheckedBlock) -> bool:
        """Wait for the check of a block that has been read. Returns whether it may be used."""
        try:
            block.check.result()
        except DamagedBlock as exc:
            self._lose(block.key, block.path, exc)
            return False
        with self._lock:
            self._read_bytes += block.num_bytes
        return True

    def _note_use(self, keys: Sequence[bytes], new: Container[bytes] = ()) -> None:
        """Note the use of blocks of one sequence, in its order."""
        for path in self._index.use(keys, new):
            now_ns = time.time_ns()  # the system's own times are equal for many files
            with suppress(OSError):
                os.utime(path, ns=(now_ns, now_ns))

    def _learn(self, num_bytes: int, seconds: float) -> None:
        """A block was read in `seconds`, and the one before it was checked."""
        rate = num_bytes / max(seconds, 1e-6)
        with self._lock:
            self._rate += LEARNING_RATE * (rate - self._rate)

    def _lose(self, key: bytes, path: Path, exc: OSError | DamagedBlock) -> None:
        """Drop a block that cannot be read."""
        self._index.drop(key)
        if isinstance(exc, DamagedBlock):
            with suppress(OSError):
                os.unlink(path)
        self._failed("read", exc)

    # The writing thread

    def _write_all(self) -> None:
        while True:
            try:
                job = self._writes.get(timeout=LOOK_S)
            except queue.Empty:
                job = []
            if isinstance(job, Reopen):
                self._open(job)
                continue
            if self._may_have_changed:
                self._scan()
            if isinstance(job, list):
                _unlink(job)
                continue
            num_bytes = 0
            try:
                num_bytes = self._write(job)
            except Exception as exc:  # nothing of it is stored
                self._rest(exc)
            with self._lock:
                del self._jobs[job.ticket]
                if not job.is_cancelled:
                    self._written_jobs.append(Written(job.ticket, num_bytes))
            self._tell()

    @property
    def _may_have_changed(self) -> bool:
        """Whether it is time to scan the folder for changes by other servers."""
        num_bytes = self._written_bytes - self._scanned_at_bytes
        if num_bytes * WRITTEN_SHARE >= self._max_bytes:
            return True
        return self._was_asked and time.monotonic() > self._scanned_s + LOOK_S

    def _scan(self) -> None:
        self._was_asked = False
        self._scanned_at_bytes = self._written_bytes
        self._index.scan()
        self._scanned_s = time.monotonic()

    def _open(self, asked: Reopen) -> None:
        """Compute the fingerprint of the weights, and find their stored blocks."""
        try:
            chain = KeyChain(asked.identify(), self._block_len)
        except Exception as exc:
            log.exception("not_opened", exc)
            with self._lock:
                if self._is_wanted(asked):
                    self._state = f"the weights could not be read: {exc}"
            return
        self._scan()
        with self._lock:
            if not self._is_wanted(asked):
                return
            self._state = "open"
            self._chain = chain
            self._has_opened = True
        log.info(
            "opened",
            folder=self._index.folder,
            model=chain.model,
            blocks=self._index.num_of(chain.model),
            bytes=self._index.num_bytes,
        )
        self._tell()

    def _is_wanted(self, asked: Reopen) -> bool:
        """Whether the weights have not changed again, and the store is in use."""
        return asked.number == self._num_renewed and not self._is_stopped

    def _write(self, job: TransferJob) -> int:
        """Returns the number of written bytes."""
        chain = job.chain
        if chain is None or self._is_stopped or time.monotonic() < self._rests_until_s:
            return 0
        total = 0
        # A block cannot be found without the blocks before it. So no block of a sequence is deleted
        # for another of the same one, and its end is deleted before its beginning.
        own = list(chain.keys(job.key))
        self._note_use(own)
        spared = frozenset(own)
        added: list[bytes] = []
        for part in self._parts(chain, job):
            if part.key in self._index:
                continue
            if job.is_cancelled:
                break
            began_s = time.monotonic()
            size = file_bytes(len(part.tokens), sum(len(piece) for piece in part.pieces))
            if not self._make_room(size, spared):
                break
            path = self._index.path(chain.model, part.key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_bytes = write_block(
                path, part.key, part.tokens, part.pieces, lambda: self._is_whole(job)
            )
            if not num_bytes:
                break
            self._index.add(chain.model, part.key, num_bytes)
            added.append(part.key)
            total += num_bytes
            self._written_bytes += num_bytes
            ended_s = time.monotonic()
            time.sleep(rest_s(ended_s - began_s, ended_s - self._turned_s))
        if added:
            endings = [key for key in added if key not in spared]
            self._note_use([*own, *endings], frozenset(added))
        return total

    def _is_whole(self, job: TransferJob) -> bool:
        """After the pages were read: whether they still belonged to the job."""
        with self._lock:
            return not job.is_cancelled

    def _make_room(self, num_bytes: int, spared: frozenset[bytes]) -> bool:
        """Delete blocks that are not `spared` until another block may be written. Returns whether
        it may."""
        while self._index.num_bytes + num_bytes > self._max_bytes:
            key = self._index.oldest()
            if key is None or key in spared:
                return False
            path = self._index.drop(key)
            if path is not None:
                _unlink([path])
                self._dropped_blocks += 1
        try:
            status = os.statvfs(self._index.folder)
        except FileNotFoundError:
            return True  # it will be created again
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes - num_bytes < self._floor_bytes:
            self._rest(OSError(f"only {free_bytes:,} bytes are free on its file system"))
            return False
        return True

    def _rest(self, exc: Exception) -> None:
        """A block could not be written, so write none for a while."""
        self._rests_until_s = time.monotonic() + REST_S
        self._failed("write", exc)

    # Both

    def _parts(self, chain: KeyChain, job: TransferJob) -> Iterator[StoredPart]:
        """The blocks of a transfer in order, and after them its ending."""
        last = b""
        tokens = b""
        for number, key in enumerate(chain.keys(job.key)):
            last = key
            start = number * chain.block_bytes
            tokens = job.key.tokens[start : start + chain.block_bytes]
            if number * self._block_len >= job.start:
                yield StoredPart(key, tokens, self._pieces(job, number), self._block_len)
        if self._endings is not None and len(job.ending):
            pieces: list[memoryview] = []
            for place in job.ending.tolist():
                pieces += self._endings.pieces(place)
            yield StoredPart(chain.ending(last), tokens, pieces, 0)

    def _pieces(self, job: TransferJob, number: int) -> list[memoryview]:
        """The memory of a block, page by page."""
        num_pages = self._block_len // self._page_size
        first = (number * self._block_len - job.start) // self._page_size
        pieces: list[memoryview] = []
        for page in job.pages[first : first + num_pages].tolist():
            pieces += self._pool.pieces(page)
        return pieces

    def _failed(self, what: str, exc: Exception) -> None:
        with self._lock:
            self._faults += 1
        log.seldom("block_lost", what=what, error=f"{type(exc).__name__}: {exc}")

    def _tell(self) -> None:
        with self._lock:
            self._has_news = True
            self._lock.notify_all()
        self._notify()


def rest_s(took_s: float, since_turn_s: float) -> float:
    """How long the writing thread rests after a block that took `took_s`, if the engine last called
    `take` `since_turn_s` ago."""
    if since_turn_s > IDLE_S:
        return 0.0
    return min(REST_SHARE * took_s, LONGEST_REST_S)


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)

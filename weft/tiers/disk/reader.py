"""The threads that read stored blocks: one reads, straight into the pool's pages; one checks the
block before it meanwhile. A block that cannot be read is dropped from the index."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weft.tiers.disk.files import DamagedBlock, read_block, touch
from weft.tiers.disk.index import BlockIndex
from weft.tiers.disk.jobs import BlockMemory, Jobs, StoredPart, TransferJob
from weft.tiers.disk.opening import Opening
from weft.tiers.keys import KeyChain

FIRST_RATE = 500e6  # bytes per second, until a rate is measured
LEARNING_RATE = 0.3


class UncheckedBlock(NamedTuple):
    """A block that has been read and is being checked."""

    key: bytes
    path: Path
    num_bytes: int
    num_tokens: int  # as in `StoredPart`
    check: Future[None]  # raises DamagedBlock


class BlockReader:
    """The engine's thread calls `start` and `read`."""

    def __init__(
        self, index: BlockIndex, memory: BlockMemory, jobs: Jobs, opening: Opening
    ) -> None:
        self._index = index
        self._memory = memory
        self._jobs = jobs
        self._opening = opening
        self._queue: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="weft-cache-checks")
        self.rate = FIRST_RATE
        self.num_bytes = 0  # that were read since the start

    def start(self) -> None:
        threading.Thread(target=self._run, name="weft-cache-reads", daemon=True).start()

    def read(self, job: TransferJob) -> None:
        """Let the thread read. Returns at once."""
        self._queue.put(job)

    def close(self) -> None:
        """End the threads when they have done all their work."""
        self._queue.put(None)

    # The thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            num_tokens = 0
            try:
                num_tokens = self._read(job)
            except Exception as exc:  # after any error the request computes its prompt
                self._jobs.failed("read", exc)
            self._jobs.end_read(job, num_tokens)
        self._checks.shutdown()

    def _read(self, job: TransferJob) -> int:
        """Returns the number of tokens that were read."""
        chain = job.chain
        if chain is None or self._opening.is_stopped:
            return 0
        num_tokens = 0
        keys: list[bytes] = []
        for block in self._sound_blocks(chain, job):
            num_tokens += block.num_tokens
            keys.append(block.key)
            job.has_read(block.num_tokens)
        touch(self._index.use(keys))
        return num_tokens

    def _sound_blocks(self, chain: KeyChain, job: TransferJob) -> Iterator[UncheckedBlock]:
        """The blocks of a transfer, read and checked, up to the first one that fails. While one is
        being read, the one before it is checked."""
        before: UncheckedBlock | None = None
        began_s = time.monotonic()
        is_first = True
        for part in self._memory.parts(chain, job):
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
        self.num_bytes += block.num_bytes
        return True

    def _learn(self, num_bytes: int, seconds: float) -> None:
        """A block was read in `seconds`, and the one before it was checked."""
        rate = num_bytes / max(seconds, 1e-6)
        self.rate += LEARNING_RATE * (rate - self.rate)

    def _lose(self, key: bytes, path: Path, exc: OSError | DamagedBlock) -> None:
        """Drop a block that cannot be read."""
        self._index.drop(key)
        if isinstance(exc, DamagedBlock):
            with suppress(OSError):
                os.unlink(path)
        self._jobs.failed("read", exc)

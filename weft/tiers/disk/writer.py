"""The thread that changes the folder: it finds the stored blocks of new weights, writes blocks,
deletes others for them, and looks for changes by other servers.

A block that cannot be written is not stored. After a failed write, nothing is written for a minute.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from pathlib import Path
from typing import TypeAlias

from weft.observe.log import EventLog
from weft.tiers.disk.files import file_bytes, touch, unlink, write_block
from weft.tiers.disk.index import BlockIndex
from weft.tiers.disk.jobs import BlockMemory, Jobs, TransferJob
from weft.tiers.disk.opening import Opening, Reopen

FLOOR_BYTES = 1_000_000_000  # free space that must remain on the file system
REST_S = 60.0  # pause after a failed write
# Other servers may share the folder, so it is scanned after this time while the store is used, and
# whenever this server has written a sixteenth of the allowed bytes.
LOOK_S = 60.0
WRITTEN_SHARE = 16
# While requests run, the writing thread rests after each block for this multiple of the block's
# time, because it uses their processor time. If the engine runs no steps, it does not rest.
REST_SHARE = 9.0
LONGEST_REST_S = 0.02
IDLE_S = 0.2

log = EventLog("cache")

Work: TypeAlias = TransferJob | Reopen | list[Path]


class BlockWriter:
    """The files take at most `max_bytes`; `floor_bytes` remain free on their file system. The
    engine's thread calls `start` and `do`, and sets `was_asked` and `turned_s`."""

    def __init__(
        self,
        index: BlockIndex,
        memory: BlockMemory,
        jobs: Jobs,
        opening: Opening,
        *,
        max_bytes: int,
        floor_bytes: int,
    ) -> None:
        self._index = index
        self._memory = memory
        self._jobs = jobs
        self._opening = opening
        self._max_bytes = max_bytes
        self._floor_bytes = floor_bytes
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._scanned_s = -math.inf  # when the folder was scanned last
        self._scanned_at_bytes = 0  # bytes written before the last scan
        self.was_asked = False  # since the last scan
        self.turned_s = -math.inf  # when the engine last called `take`
        self.rests_until_s = -math.inf
        self.num_bytes = 0  # that were written since the start
        self.num_dropped = 0  # blocks that were deleted for others

    def start(self) -> None:
        threading.Thread(target=self._run, name="weft-cache-writes", daemon=True).start()

    def do(self, job: Work) -> None:
        """Let the thread write a transfer, find blocks, or delete files. Returns at once."""
        self._queue.put(job)

    def close(self) -> None:
        """End the thread when it has done all its work."""
        self._queue.put(None)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                job = []
            if job is None:
                return
            if isinstance(job, Reopen):
                self._open(job)
                continue
            if self._may_have_changed:
                self._scan()
            if isinstance(job, list):
                unlink(job)
                continue
            num_bytes = 0
            try:
                num_bytes = self._write(job)
            except Exception as exc:  # nothing of it is stored
                self._rest(exc)
            self._jobs.end_write(job, num_bytes)

    @property
    def _may_have_changed(self) -> bool:
        """Whether it is time to scan the folder for changes by other servers."""
        num_bytes = self.num_bytes - self._scanned_at_bytes
        if num_bytes * WRITTEN_SHARE >= self._max_bytes:
            return True
        return self.was_asked and time.monotonic() > self._scanned_s + LOOK_S

    def _scan(self) -> None:
        self.was_asked = False
        self._scanned_at_bytes = self.num_bytes
        self._index.scan()
        self._scanned_s = time.monotonic()

    def _open(self, asked: Reopen) -> None:
        """Compute the fingerprint of the weights, and find their stored blocks."""
        chain = self._opening.chain_of(asked)
        if chain is None:
            return
        self._scan()
        if self._opening.opened(asked, chain):
            log.info(
                "opened",
                folder=self._index.folder,
                model=chain.model,
                blocks=self._index.num_of(chain.model),
                bytes=self._index.num_bytes,
            )

    def _write(self, job: TransferJob) -> int:
        """Returns the number of written bytes."""
        chain = job.chain
        if chain is None or self._opening.is_stopped or time.monotonic() < self.rests_until_s:
            return 0
        total = 0
        # A block cannot be found without the blocks before it. So no block of a sequence is deleted
        # for another of the same one, and its end is deleted before its beginning.
        own = list(chain.keys(job.key))
        touch(self._index.use(own))
        spared = frozenset(own)
        added: list[bytes] = []
        for part in self._memory.parts(chain, job):
            if part.key in self._index:
                continue
            if job.is_cancelled:
                break
            began_s = time.monotonic()
            size = file_bytes(len(part.tokens), sum(len(piece) for piece in part.pieces))
            if not self._make_room(size, spared):
                break
            path = self._index.path(chain.model, part.key)
            self._make_folders(path.parent)
            num_bytes = write_block(
                path, part.key, part.tokens, part.pieces, lambda: self._jobs.is_complete(job)
            )
            if not num_bytes:
                break
            self._index.add(chain.model, part.key, num_bytes)
            added.append(part.key)
            total += num_bytes
            self.num_bytes += num_bytes
            ended_s = time.monotonic()
            time.sleep(rest_s(ended_s - began_s, ended_s - self.turned_s))
        if added:
            resume_states = [key for key in added if key not in spared]
            touch(self._index.use([*own, *resume_states], frozenset(added)))
        return total

    def _make_folders(self, inner: Path) -> None:
        """For this user alone, each of them: `mkdir` gives the mode only to the last one."""
        folder = self._index.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in inner.relative_to(folder).parts:
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)

    def _make_room(self, num_bytes: int, spared: frozenset[bytes]) -> bool:
        """Delete blocks that are not `spared` until another block may be written. Returns whether
        it may."""
        while self._index.num_bytes + num_bytes > self._max_bytes:
            key = self._index.oldest()
            if key is None or key in spared:
                return False
            path = self._index.drop(key)
            if path is not None:
                unlink([path])
                self.num_dropped += 1
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
        self.rests_until_s = time.monotonic() + REST_S
        self._jobs.failed("write", exc)


def rest_s(took_s: float, since_turn_s: float) -> float:
    """How long the writing thread rests after a block that took `took_s`, if the engine last called
    `take` `since_turn_s` ago."""
    if since_turn_s > IDLE_S:
        return 0.0
    return min(REST_SHARE * took_s, LONGEST_REST_S)

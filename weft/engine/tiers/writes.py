"""What is written to a store: sequences that were used twice, those that will be evicted next, and
everything on request. One transfer at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.engine.core import EngineCore
from weft.engine.tiers.store import UsedStore
from weft.memory.prefix_cache import CacheKey
from weft.messages.cache import SaveCacheReply
from weft.scheduler.features.tiers import TiersFeature

# Bytes that are written at once: this much memory is locked for a write.
WRITE_BYTES = 64_000_000
# If less than a fourth of the pool is free, this many sequences are written before they are
# evicted, and more are looked for after a while.
LOW_PART = 4
MAX_OLDEST = 8
LOOK_EVERY_S = 0.05
MAX_LOOKS = 8  # sequences that are considered for writing in one step


class PendingSave(NamedTuple):
    """A call that waits until everything is written."""

    call: int
    until_s: float
    num_bytes: int  # bytes that had been written before


class UnstoredPart(NamedTuple):
    """The part of a sequence to write."""

    key: CacheKey  # of all tokens up to the end of the part
    start: int
    with_resume_state: bool

    @property
    def end(self) -> int:
        return self.key.num_tokens


class TierWrites:
    def __init__(self, core: EngineCore, feature: TiersFeature, store: UsedStore) -> None:
        self._core = core
        self._kv = core.scheduler.kv
        self._feature = feature
        self._store = store
        self._settings = store.settings
        self._transfers = store.transfers
        self._tiers = store.tiers
        self.next_look_s = -math.inf  # time of the next look for sequences that will be evicted
        # The sequence that was written last in part, and the end of that part.
        self._writing: CacheKey | None = None
        self._writing_end = 0
        self._oldest: set[CacheKey] = set()  # sequences that would be evicted next at the last look
        self.saves: list[PendingSave] = []
        self._num_bytes = 0  # that were written

    def written(self, ticket: int, num_bytes: int) -> None:
        """A write has ended."""
        self._transfers.written(ticket)
        self._num_bytes += num_bytes
        if not num_bytes and self._writing is not None:
            self._feature.worthy.pop(self._writing, None)  # it cannot be written now
            self._writing = None

    def write(self, now: float) -> None:
        """Write the next part of a sequence worth storing: one at a time, and none while requests
        wait for reads."""
        feature = self._feature
        if self._store.is_shut:
            feature.worthy.clear()
        if not feature.worthy or not self._store.is_open:
            return
        if feature.waiting or self._transfers.table.writing is not None:
            return
        for _ in range(min(MAX_LOOKS, len(feature.worthy))):
            key = next(iter(feature.worthy))
            part = self._unstored(key)
            # If there is no room for all of it, writing may have dropped its beginning again.
            is_again = key == self._writing
            is_in_vain = is_again and part is not None and part.end <= self._writing_end
            if part is None or is_in_vain:
                del feature.worthy[key]
                self._writing = None
                continue
            step = self._core.scheduler.planner.num_steps - 1
            self._transfers.write(
                part.key, part.start, step=step, now=now, with_resume_state=part.with_resume_state
            )
            self._writing = key
            self._writing_end = part.end
            return

    def save_oldest(self, now: float) -> None:
        """If memory is nearly used up, write the sequences that will be evicted next."""
        kv = self._kv
        feature = self._feature
        if feature.worthy or self._transfers.table.writing is not None or now < self.next_look_s:
            return
        if not self._store.is_open or kv.allocator.num_free * LOW_PART > kv.allocator.num_pages:
            return
        self.next_look_s = now + LOOK_EVERY_S
        oldest = kv.cache.tree.sequences()[-MAX_OLDEST:]
        for key in oldest:  # each is put before the others, the one that is evicted next at last
            # Once only: if the store has no room for all, they would evict each other there.
            if key not in self._oldest:
                feature.is_worthy_now(key)
        self._oldest = set(oldest)

    def _unstored(self, key: CacheKey) -> UnstoredPart | None:
        """The next part of a sequence to write; None: there is none."""
        block_len = self._settings.block_len
        most = max(WRITE_BYTES // max(self._settings.block_bytes, 1), 1)
        for length in self._transfers.memory.resumable_lengths(key, block_len):
            beginning = key.first(length)
            present = self._tiers.lacks(beginning)
            if present.num_tokens >= length and present.can_resume:
                continue
            end = min(length, present.num_tokens + most * block_len)
            part = key.first(end)
            return UnstoredPart(part, present.num_tokens, with_resume_state=end == length)
        return None

    def save(self, call: int, until_s: float) -> None:
        """Write all cached sequences, most recently used first. Answered when done, or at
        `until_s`."""
        self.saves.append(PendingSave(call, until_s, self._num_bytes))
        if self._settings.write != "off":
            for key in self._kv.cache.tree.sequences():
                self._feature.worthy[key] = None

    def answer_saves(self, now: float) -> None:
        is_done = not self._feature.worthy and self._transfers.table.writing is None
        for save in list(self.saves):
            if not is_done and self._store.is_open and now < save.until_s:
                continue
            self.saves.remove(save)
            message = ""
            if not self._store.is_open:
                message = self._tiers.report().state
            elif not is_done:
                message = "the time was over before all was written"
            self._core.send(
                SaveCacheReply(
                    call=save.call,
                    success=not message,
                    message=message,
                    written_bytes=self._num_bytes - save.num_bytes,
                )
            )

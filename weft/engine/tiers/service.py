"""The store of KV outside of the pool, between the engine's steps: what is read for a request, how
long the request waits, and what is written.

    a request opens ─▶ reads: begin one, and the request waits
    before a step   ─▶ take what has ended; requests continue
    after a step    ─▶ writes

No call waits for a disk, and after a fault the prompt is computed.
"""

from __future__ import annotations

import math

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.engine.tiers.reads import TierReads
from weft.engine.tiers.store import HUNG_S, UsedStore
from weft.engine.tiers.writes import TierWrites
from weft.memory.prefix_cache import CacheKey
from weft.memory.tiers.protocol import NO_NEWS, Tiers
from weft.messages.cache import GetCacheReply
from weft.messages.requests import GenerateRequest
from weft.scheduler.features.tiers import TiersFeature


class TierService(Service):
    """Attached all the time, if there is a store."""

    name = "the stored cache"

    def __init__(self, core: EngineCore, feature: TiersFeature, tiers: Tiers) -> None:
        self._core = core
        self.feature = feature
        self._store = UsedStore(core, tiers)
        self._settings = self._store.settings
        self._transfers = self._store.transfers
        self._tiers = tiers
        self._reads = TierReads(core, feature, self._store)
        self._writes = TierWrites(core, feature, self._store)

    @property
    def block_len(self) -> int:
        """Tokens per block: only full blocks are stored."""
        return self._settings.block_len

    def wake_at(self) -> float:
        wake_at = math.inf
        for wait in self.feature.waiting.values():
            wake_at = min(wake_at, wait.until_s)
        for transfer in self._transfers.table.values():
            wake_at = min(wake_at, transfer.since_s + HUNG_S)
        for save in self._writes.saves:
            wake_at = min(wake_at, save.until_s)
        return wake_at

    # Moments

    def opened(self, message: GenerateRequest, now: float) -> None:
        if not self._store.is_open:
            self._take(now)  # it may have opened since the last step
        if self._store.is_open and self._settings.wait_s:
            self._reads.look_for(self._core.scheduler.requests[message.id], now)

    # Usually no transfer is in progress: then these two must take almost no time.

    def before_step(self, now: float) -> None:
        self._reads.before_step()
        self._take(now)
        if self.feature.waiting:
            self._reads.end_waits(now)
        if self._transfers.table:
            self._store.end_hung(now)
            self._store.begin()

    def after_step(self, now: float) -> None:
        self._reads.after_step(now)
        if self._settings.saves_evicted:
            self._writes.save_oldest(now)
        if self.feature.worthy:
            self._writes.write(now)
        if self._transfers.table:
            self._store.begin()
        if self._writes.saves:
            self._writes.answer_saves(now)
            if not self._writes.saves:
                self._core.hooks.end_work(self)

    def _take(self, now: float) -> None:
        """Take what has ended."""
        news = self._tiers.take()
        if news is NO_NEWS:
            return
        if news.has_opened:
            self._store.opened()
        for ticket, num_bytes in news.written:
            self._writes.written(ticket, num_bytes)
        for landed in news.landed:
            self._reads.land(landed, now)
        if news.written or news.landed:
            self._core.scheduler.memory_came_back()

    # For pins

    def store(self, key: CacheKey) -> None:
        """Write a cached sequence before all others."""
        if self._settings.write != "off":
            self.feature.is_worthy_now(key)

    def bring(self, key: CacheKey, now: float) -> None:
        """Read the stored part of a sequence that is not cached, if there is memory for it."""
        if self._store.is_open:
            self._reads.bring(key, now)

    # Observation

    def numbers(self) -> dict[str, int]:
        """The numbers by their names in `Stats`."""
        report = self._tiers.report()
        return {
            "disk_blocks": report.num_blocks,
            "disk_bytes": report.num_bytes,
            "total_disk_hit_tokens": self.feature.num_hits,
            "total_disk_read_bytes": report.read_bytes,
            "total_disk_written_bytes": report.written_bytes,
            "total_disk_faults": report.faults,
            "host_blocks": report.host_blocks,
            "host_bytes": report.host_bytes,
            "total_host_hit_tokens": self.feature.num_host_hits,
            "total_host_read_bytes": report.host_read_bytes,
            "total_host_written_bytes": report.host_written_bytes,
        }

    def add_to(self, reply: GetCacheReply) -> GetCacheReply:
        """The reply with the numbers of the store."""
        report = self._tiers.report()
        num_reading = sum(one.is_reading for one in self._transfers.table.values())
        num_hits = self.feature.num_hits
        return msgspec.structs.replace(
            reply,
            memory_hit_tokens=reply.memory_hit_tokens - num_hits - self.feature.num_host_hits,
            disk_hit_tokens=num_hits,
            host_hit_tokens=self.feature.num_host_hits,
            host=report.host,
            host_blocks=report.host_blocks,
            host_bytes=report.host_bytes,
            max_host_bytes=report.max_host_bytes,
            host_read_bytes=report.host_read_bytes,
            host_written_bytes=report.host_written_bytes,
            host_dropped_blocks=report.host_dropped_blocks,
            disk=report.state,
            folder=report.folder,
            disk_blocks=report.num_blocks,
            disk_bytes=report.num_bytes,
            max_bytes=report.max_bytes,
            read_bytes=report.read_bytes,
            written_bytes=report.written_bytes,
            dropped_blocks=report.dropped_blocks,
            faults=report.faults,
            reading=num_reading,
            writing=len(self._transfers.table) - num_reading,
            waiting_requests=len(self.feature.waiting),
        )

    # Calls

    def left_by_flush(self) -> str:
        """What is still stored after memory was flushed, in words for users."""
        report = self._tiers.report()
        if not report.num_blocks:
            return ""
        return (
            f"{report.num_blocks:,} blocks in {report.folder} stay, and are found again; "
            "POST /cache/clear removes them"
        )

    def clear(self) -> int:
        """Delete everything that is stored. Returns the number of deleted blocks of this model."""
        num_blocks = self._tiers.report().num_blocks
        self.feature.worthy.clear()
        self._transfers.cancel_writes()
        self._tiers.clear()
        return num_blocks

    def save(self, call: int, until_s: float) -> None:
        """Write all cached sequences, most recently used first. Answered when done, or at
        `until_s`."""
        self._writes.save(call, until_s)
        self._core.hooks.begin_work(self)

"""The store of KV outside of the pool, between the engine's steps: what is read for a request, how
long the request waits, and what is written.

    a request opens ─▶ seek ── worth it, and memory for it? ─▶ read ─▶ the request waits
    before a step   ─▶ take ─▶ land in the tree ─▶ the request continues: a hit like any other
                       its wait is over         ─▶ the request continues, and computes
    after a step    ─▶ write sequences that were used twice, one transfer at a time

No call waits for a disk, and after a fault the prompt is computed.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import msgspec

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import NO_NEWS, Landed, Tiers
from weft.messages.cache import GetCacheReply, SaveCacheReply
from weft.messages.requests import GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.admission import spare_tokens
from weft.scheduler.features.tiers import TiersFeature, TierWait
from weft.scheduler.history import EventKind
from weft.scheduler.request import Request
from weft.scheduler.settings import TierSettings
from weft.scheduler.tiers.transfers import Transfers

# Bytes that are written at once: this much memory is locked for a write.
WRITE_BYTES = 64_000_000
# A request waits for twice the expected time of its read plus this; or for half the time that
# computing the tokens would take.
PATIENCE_S = 0.05
# A longer transfer is cancelled; if the store does not confirm that either, its pages are lost.
HUNG_S = 30.0
# Steps with fewer prompt tokens say little about how fast prompts are computed.
LEAST_MEASURED = 64
LEARNING_RATE = 0.3
# If less than a fourth of the pool is free, this many sequences are written before they are
# evicted, and more are looked for after a while.
LOW_PART = 4
MAX_OLDEST = 8
LOOK_EVERY_S = 0.05
MAX_LOOKS = 8  # sequences that are considered for writing in one step

log = EventLog("cache")


class PendingSave(NamedTuple):
    """A call that waits until everything is written."""

    call: int
    until_s: float
    num_bytes: int  # bytes that had been written before


class UnstoredPart(NamedTuple):
    """The part of a sequence to write."""

    key: CacheKey  # of all tokens up to the end of the part
    start: int
    with_ending: bool

    @property
    def end(self) -> int:
        return len(self.key.tokens) // TOKEN_BYTES


class TierService(Service):
    """Attached all the time, if there is a store."""

    name = "the stored cache"

    def __init__(self, core: EngineCore, feature: TiersFeature, tiers: Tiers) -> None:
        settings = core.scheduler.settings.tiers
        assert settings is not None, "there is a store, and settings that do not know of it"
        self._core = core
        self.feature = feature
        self._kv = core.scheduler.kv
        self._transfers = Transfers(self._kv, settings, tiers)
        self.tiers = tiers
        self._counters = core.scheduler.counters
        self._has_opened = False
        self._is_shut = False  # the store is not used any more
        self._token_s = 0.0  # time to compute one token of a prompt; 0: not known yet
        self._num_prefilled = 0  # prefilled tokens before the current step
        self._next_look_s = -math.inf  # time of the next look for sequences that will be evicted
        # The sequence that was written last in part, and the end of that part.
        self._writing: CacheKey | None = None
        self._writing_end = 0
        self._oldest: set[CacheKey] = set()  # sequences that would be evicted next at the last look
        self.saves: list[PendingSave] = []
        self.num_bytes_written = 0
        self.num_landed = 0  # tokens that were read instead of computed

    @property
    def block_len(self) -> int:
        """Tokens per block: only whole blocks are stored."""
        return self._settings.block_len

    @property
    def _is_open(self) -> bool:
        """Whether the store is open, for the weights in use."""
        return self._has_opened and not self._is_shut and not self._transfers.is_stale

    @property
    def _settings(self) -> TierSettings:
        return self._transfers.settings

    def wake_at(self) -> float:
        wake_at = math.inf
        for wait in self.feature.waiting.values():
            wake_at = min(wake_at, wait.until_s)
        for transfer in self._transfers.values():
            wake_at = min(wake_at, transfer.since_s + HUNG_S)
        for save in self.saves:
            wake_at = min(wake_at, save.until_s)
        return wake_at

    # Moments

    def opened(self, message: GenerateRequest, now: float) -> None:
        if not self._is_open:
            self._take(now)  # it may have opened since the last step
        if self._is_open and self._settings.wait_s:
            self._look_for(self._core.scheduler.requests[message.id], now)

    # Usually no transfer is in progress: then these two must take almost no time.

    def before_step(self, now: float) -> None:
        self._num_prefilled = self._counters.num_prefilled_tokens
        self._take(now)
        if self.feature.waiting:
            self._end_waits(now)
        if self._transfers:
            self._end_hung(now)
            self._begin()

    def after_step(self, now: float) -> None:
        if self._counters.num_prefilled_tokens - self._num_prefilled >= LEAST_MEASURED:
            self._learn(now)
        if self._settings.saves_evicted:
            self._save_oldest(now)
        if self.feature.worthy:
            self._write(now)
        if self._transfers:
            self._begin()
        if self.saves:
            self._answer_saves(now)

    # Reading

    def _look_for(self, request: Request, now: float, before: TierWait | None = None) -> None:
        """Let a request wait if more of its prompt is stored than cached, and reading is faster.
        `before`: its wait so far, if a part has been read."""
        block_len = self._settings.block_len
        usable = request.reusable_len // block_len * block_len
        if not usable:
            return
        key = request.cache_key(request.packed[: usable * TOKEN_BYTES])
        since = self._transfers.resumable(key)
        if since >= usable:
            return
        have = self._kv.cache.peek(key)
        found = self.tiers.seek(request.id, key, have, since)
        end = min(found.num_tokens, usable)
        num_new = end - since
        compute_s = num_new * (self._token_s or math.inf)
        if num_new < block_len or found.read_s > compute_s:
            return
        ticket = self._read(key, have, end, now)
        if ticket is None:
            return  # there is no memory for it
        if before is None:
            patience_s = max(2 * found.read_s + PATIENCE_S, compute_s / 2)
            patience_s = min(patience_s, self._settings.wait_s)
            before = TierWait(ticket, since, end, now, now + patience_s)
            detail = f"{num_new:,} of its tokens are being read from {self._settings.where}"
            self._core.note(request.id, EventKind.STORED, detail, now)
        self.feature.waiting[request.id] = before._replace(ticket=ticket, num_tokens=end)

    def _read(self, key: CacheKey, have: int, end: int, now: float) -> int | None:
        """Read the tokens of `key` from `have` to `end`, or the first of them if there is room for
        fewer. Returns the ticket, also of a transfer that reads them already."""
        block_len = self._settings.block_len
        # If all tokens are cached, only the ending may be missing.
        start = min(have // block_len * block_len, end)
        whole = CacheKey(key.namespace, key.tokens[: end * TOKEN_BYTES])
        ticket = self._transfers.reading(whole, start)
        if ticket is not None:
            return ticket
        ratio = self._core.scheduler.prefills.new_token_ratio.current
        spare = spare_tokens(self._kv, ratio)
        readable = start + self._transfers.room(spare)
        ending = NO_PAGES
        if end <= readable:
            reserved = self._kv.endings.reserve(end, spare - (end - start))
            if reserved is None:
                return None
            ending = reserved
        elif readable - have < block_len:
            return None
        end = min(end, readable)
        part = CacheKey(key.namespace, key.tokens[: end * TOKEN_BYTES])
        step = self._core.scheduler.planner.num_steps - 1
        ticket = self._transfers.read(part, start, step=step, now=now, ending=ending)
        if ticket is None and len(ending):
            self._kv.endings.memory.give_back(ending)
        return ticket

    def _begin(self) -> None:
        """Begin the transfers that need not wait for a launched step any more."""
        first = self._core.loop.first_in_flight
        if first is None:
            first = self._core.scheduler.planner.num_steps
        self._transfers.begin(first)

    def _take(self, now: float) -> None:
        news = self.tiers.take()
        if news is NO_NEWS:
            return
        if news.has_opened:
            self._has_opened = True
            self._transfers.reopened()
        for ticket, num_bytes in news.written:
            self._transfers.written(ticket)
            self.num_bytes_written += num_bytes
            if not num_bytes and self._writing is not None:
                self.feature.worthy.pop(self._writing, None)  # it cannot be written now
                self._writing = None
        for landed in news.landed:
            self._land(landed, now)
        if news.written or news.landed:
            self._core.scheduler.memory_came_back()

    def _land(self, landed: Landed, now: float) -> None:
        num_new = self._transfers.land(
            landed.ticket, landed.num_tokens, has_ending=landed.has_ending
        )
        self.num_landed += num_new
        requests = self._core.scheduler.requests
        for id in self._waiting_for(landed.ticket):
            wait = self.feature.waiting.pop(id)
            if num_new:
                num_from_host = wait.num_from_host + landed.num_from_host
                wait = wait._replace(num_from_host=num_from_host)
                self.feature.landed[id] = wait
            took_ms = 1e3 * (now - wait.since_s)
            where = self._settings.where
            detail = f"{landed.num_tokens:,} tokens came from {where} after {took_ms:,.0f} ms"
            self._core.note(id, EventKind.STORED, detail, now)
            # There may be more to read, if there was no room for all, or another request read this
            # part.
            if self._is_open and num_new and now < wait.until_s:
                self._look_for(requests[id], now, wait)

    def _waiting_for(self, ticket: int) -> list[int]:
        waiting = self.feature.waiting.items()
        return [id for id, wait in waiting if wait.ticket == ticket]

    def _end_waits(self, now: float) -> None:
        """Let requests continue whose time to wait is over."""
        for id, wait in list(self.feature.waiting.items()):
            if now < wait.until_s and wait.ticket in self._transfers:
                continue
            del self.feature.waiting[id]
            late_ms = 1e3 * (now - wait.since_s)
            where = self._settings.where
            detail = f"nothing came from {where} in {late_ms:,.0f} ms: it computes its prompt"
            self._core.note(id, EventKind.STORED, detail, now)
            if wait.ticket in self._transfers and not self._waiting_for(wait.ticket):
                self._transfers.cancel(wait.ticket, now)

    def _end_hung(self, now: float) -> None:
        """Cancel transfers that take too long. If a read does not end even then, its pages are
        quarantined, and the store is not used any more."""
        for ticket, transfer in self._transfers.items():
            if now < transfer.since_s + HUNG_S:
                continue
            is_lost = transfer.is_cancelled
            if not is_lost:
                self._transfers.cancel(ticket, now)
            if is_lost or not transfer.is_reading:
                self._shut(f"the {self._settings.where} does not answer")
            if is_lost:
                log.error("pages_lost", pages=len(transfer.pages), after_s=2 * HUNG_S)
                self._transfers.give_up(ticket)
                self._core.settle()
                self._core.scheduler.shrink()

    def _shut(self, why: str) -> None:
        """Stop using the store."""
        self._is_shut = True
        self.feature.worthy.clear()
        self.tiers.stop(why)

    def _learn(self, now: float) -> None:
        """Learn the speed of prefills from the step that has ended."""
        num_tokens = self._counters.num_prefilled_tokens - self._num_prefilled
        token_s = (now - self._core.began_s) / num_tokens
        if not self._token_s:
            self._token_s = token_s
        self._token_s += LEARNING_RATE * (token_s - self._token_s)

    # Writing

    def _write(self, now: float) -> None:
        """Write the next part of a sequence worth storing: one at a time, and none while requests
        wait for reads."""
        feature = self.feature
        if self._is_shut:
            feature.worthy.clear()
        if not feature.worthy or not self._is_open:
            return
        if feature.waiting or self._transfers.writing is not None:
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
                part.key, part.start, step=step, now=now, with_ending=part.with_ending
            )
            self._writing = key
            self._writing_end = part.end
            return

    def _save_oldest(self, now: float) -> None:
        """If memory is nearly used up, write the sequences that will be evicted next."""
        kv = self._kv
        feature = self.feature
        if feature.worthy or self._transfers.writing is not None or now < self._next_look_s:
            return
        if not self._is_open or kv.allocator.num_free * LOW_PART > kv.allocator.num_pages:
            return
        self._next_look_s = now + LOOK_EVERY_S
        oldest = kv.cache.sequences()[-MAX_OLDEST:]
        for key in reversed(oldest):
            # Once only: if the store has no room for all, they would evict each other there.
            if key not in self._oldest:
                feature.is_worthy_now(key)
        self._oldest = set(oldest)

    def _unstored(self, key: CacheKey) -> UnstoredPart | None:
        """The next part of a sequence to write; None: there is none."""
        block_len = self._settings.block_len
        most = max(WRITE_BYTES // max(self._settings.block_bytes, 1), 1)
        for place in self._transfers.places(key):
            beginning = CacheKey(key.namespace, key.tokens[: place * TOKEN_BYTES])
            present = self.tiers.lacks(beginning)
            if present.num_tokens >= place and present.can_resume:
                continue
            end = min(place, present.num_tokens + most * block_len)
            part = CacheKey(key.namespace, key.tokens[: end * TOKEN_BYTES])
            return UnstoredPart(part, present.num_tokens, with_ending=end == place)
        return None

    # For pins

    def store(self, key: CacheKey) -> None:
        """Write a cached sequence before all others."""
        if self._settings.write != "off":
            self.feature.is_worthy_now(key)

    def bring(self, key: CacheKey, now: float) -> None:
        """Read the stored part of a sequence that is not cached, if there is memory for it."""
        if not self._is_open:
            return
        since = self._transfers.resumable(key)
        have = self._kv.cache.peek(key)
        found = self.tiers.seek(_id_of_pin(key), key, have, since)
        if found.num_tokens - since >= self.block_len:
            self._read(key, have, found.num_tokens, now)

    # Observation

    def numbers(self) -> dict[str, int]:
        """The numbers by their names in `Stats`."""
        report = self.tiers.report()
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
        report = self.tiers.report()
        num_reading = sum(one.is_reading for one in self._transfers.values())
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
            writing=len(self._transfers) - num_reading,
            waiting_requests=len(self.feature.waiting),
        )

    # Calls

    def left_by_flush(self) -> str:
        """What is still stored after memory was flushed, in words for users."""
        report = self.tiers.report()
        if not report.num_blocks:
            return ""
        return (
            f"{report.num_blocks:,} blocks in {report.folder} stay, and are found again; "
            "POST /cache/clear removes them"
        )

    def clear(self) -> int:
        """Delete everything that is stored. Returns the number of deleted blocks of this model."""
        num_blocks = self.tiers.report().num_blocks
        self.feature.worthy.clear()
        self._transfers.cancel_writes()
        self.tiers.clear()
        return num_blocks

    def save(self, call: int, until_s: float) -> None:
        """Write all cached sequences, most recently used first. Answered when done, or at
        `until_s`."""
        self.saves.append(PendingSave(call, until_s, self.num_bytes_written))
        if self._settings.write != "off":
            for key in self._kv.cache.sequences():
                self.feature.worthy[key] = None
        self._core.hooks.begin_work(self)

    def _answer_saves(self, now: float) -> None:
        is_done = not self.feature.worthy and self._transfers.writing is None
        for save in list(self.saves):
            if not is_done and self._is_open and now < save.until_s:
                continue
            self.saves.remove(save)
            message = ""
            if not self._is_open:
                message = self.tiers.report().state
            elif not is_done:
                message = "the time was over before all was written"
            self._core.send(
                SaveCacheReply(
                    call=save.call,
                    success=not message,
                    message=message,
                    written_bytes=self.num_bytes_written - save.num_bytes,
                )
            )
        if not self.saves:
            self._core.hooks.end_work(self)


def _id_of_pin(key: CacheKey) -> int:
    """The id by which a pin asks a store, instead of a request's id. A journal records only
    results, so successive pins must have different ids."""
    namespace = key.namespace.encode()
    checksum = zlib.crc32(namespace)
    checksum = zlib.crc32(key.tokens, checksum)
    return -2 - checksum

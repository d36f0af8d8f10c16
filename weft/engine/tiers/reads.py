"""What is read from a store for requests, and how long they wait for it.

a request opens ─▶ seek ── worth it, and memory for it? ─▶ read ─▶ the request waits
it has landed   ─▶ the tree has it ─▶ the request continues: a hit like any other
its wait is over                   ─▶ the request continues, and computes
"""

from __future__ import annotations

import math
import zlib

from weft.engine.core import EngineCore
from weft.engine.tiers.store import UsedStore
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import Landed
from weft.scheduler.admission import spare_tokens
from weft.scheduler.features.tiers import TiersFeature, TierWait
from weft.scheduler.history import EventKind
from weft.scheduler.request import Request

# A request waits for twice the expected time of its read plus this; or for half the time that
# computing the tokens would take.
PATIENCE_S = 0.05
# Steps with fewer prompt tokens say little about how fast prompts are computed.
LEAST_MEASURED = 64
LEARNING_RATE = 0.3


class PrefillSpeed:
    """How fast prompts are computed, learnt from the steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._counters = core.scheduler.counters
        self._num_prefilled = 0  # prefilled tokens before the current step
        self.token_s = 0.0  # time to compute one token of a prompt; 0: not known yet

    def before_step(self) -> None:
        self._num_prefilled = self._counters.num_prefilled_tokens

    def after_step(self, now: float) -> None:
        num_tokens = self._counters.num_prefilled_tokens - self._num_prefilled
        if num_tokens < LEAST_MEASURED:
            return
        token_s = (now - self._core.began_s) / num_tokens
        if not self.token_s:
            self.token_s = token_s
        self.token_s += LEARNING_RATE * (token_s - self.token_s)


class TierReads:
    def __init__(self, core: EngineCore, feature: TiersFeature, store: UsedStore) -> None:
        self._core = core
        self._kv = core.scheduler.kv
        self._feature = feature
        self._store = store
        self._settings = store.settings
        self._transfers = store.transfers
        self._tiers = store.tiers
        self._speed = PrefillSpeed(core)
        self.num_landed = 0  # tokens that were read instead of computed

    def before_step(self) -> None:
        self._speed.before_step()

    def after_step(self, now: float) -> None:
        self._speed.after_step(now)

    def look_for(self, request: Request, now: float, before: TierWait | None = None) -> None:
        """Let a request wait if more of its prompt is stored than cached, and reading is faster.
        `before`: its wait so far, if a part has been read."""
        block_len = self._settings.block_len
        usable = request.reusable_len // block_len * block_len
        if not usable:
            return
        key = request.cache_key(request.packed[: usable * TOKEN_BYTES])
        since = self._transfers.memory.resumable(key)
        if since >= usable:
            return
        have = self._kv.cache.peek(key)
        found = self._tiers.seek(request.id, key, have, since)
        end = min(found.num_tokens, usable)
        num_new = end - since
        compute_s = num_new * (self._speed.token_s or math.inf)
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
        self._feature.waiting[request.id] = before._replace(ticket=ticket, num_tokens=end)

    def _read(self, key: CacheKey, have: int, end: int, now: float) -> int | None:
        """Read the tokens of `key` from `have` to `end`, or the first of them if there is room for
        fewer. Returns the ticket, also of a transfer that reads them already."""
        block_len = self._settings.block_len
        # If all tokens are cached, only the resume state may be missing.
        start = min(have // block_len * block_len, end)
        until_end = key.first(end)
        ticket = self._transfers.table.reading(until_end, start, block_len)
        if ticket is not None:
            return ticket
        ratio = self._core.scheduler.prefills.new_token_ratio.current
        spare = spare_tokens(self._kv, ratio)
        readable = start + self._transfers.room(spare)
        resume_state = NO_PAGES
        if end <= readable:
            reserved = self._kv.resume_states.reserve(end, spare - (end - start))
            if reserved is None:
                return None
            resume_state = reserved
        elif readable - have < block_len:
            return None
        end = min(end, readable)
        part = key.first(end)
        step = self._core.scheduler.planner.num_steps - 1
        ticket = self._transfers.read(part, start, step=step, now=now, resume_state=resume_state)
        if ticket is None and len(resume_state):
            self._kv.resume_states.memory.give_back(resume_state)
        return ticket

    def land(self, landed: Landed, now: float) -> None:
        num_new = self._transfers.land(
            landed.ticket, landed.num_tokens, has_resume_state=landed.has_resume_state
        )
        self.num_landed += num_new
        requests = self._core.scheduler.requests
        for id in self._waiting_for(landed.ticket):
            wait = self._feature.waiting.pop(id)
            if num_new:
                num_from_host = wait.num_from_host + landed.num_from_host
                wait = wait._replace(num_from_host=num_from_host)
                self._feature.landed[id] = wait
            took_ms = 1e3 * (now - wait.since_s)
            where = self._settings.where
            detail = f"{landed.num_tokens:,} tokens came from {where} after {took_ms:,.0f} ms"
            self._core.note(id, EventKind.STORED, detail, now)
            # There may be more to read, if there was no room for all, or another request read this
            # part.
            if self._store.is_open and num_new and now < wait.until_s:
                self.look_for(requests[id], now, wait)

    def _waiting_for(self, ticket: int) -> list[int]:
        waiting = self._feature.waiting.items()
        return [id for id, wait in waiting if wait.ticket == ticket]

    def end_waits(self, now: float) -> None:
        """Let requests continue whose time to wait is over."""
        for id, wait in list(self._feature.waiting.items()):
            if now < wait.until_s and wait.ticket in self._transfers.table:
                continue
            del self._feature.waiting[id]
            late_ms = 1e3 * (now - wait.since_s)
            where = self._settings.where
            detail = f"nothing came from {where} in {late_ms:,.0f} ms: it computes its prompt"
            self._core.note(id, EventKind.STORED, detail, now)
            if wait.ticket in self._transfers.table and not self._waiting_for(wait.ticket):
                self._transfers.cancel(wait.ticket, now)

    def bring(self, key: CacheKey, now: float) -> None:
        """Read the stored part of a sequence that is not cached, if there is memory for it."""
        since = self._transfers.memory.resumable(key)
        have = self._kv.cache.peek(key)
        found = self._tiers.seek(_id_of_pin(key), key, have, since)
        if found.num_tokens - since >= self._settings.block_len:
            self._read(key, have, found.num_tokens, now)


def _id_of_pin(key: CacheKey) -> int:
    """The id by which a pin asks a store, instead of a request's id. A journal records only
    results, so successive pins must have different ids."""
    namespace = key.namespace.encode()
    checksum = zlib.crc32(namespace)
    checksum = zlib.crc32(key.tokens, checksum)
    return -2 - checksum

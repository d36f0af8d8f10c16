"""Requests whose KV is stored outside of the pool: they wait for a bounded time while it is being
read. The feature also collects sequences that should be stored.

Every request uses this feature if there is a store. `engine/tiers/` decides what is read
and written, and when.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey
from weft.messages.replies import FinishReason
from weft.scheduler.feature import Admission, Feature
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request
from weft.scheduler.settings import TierSettings

MAX_WORTHY = 256  # sequences that wait to be written; the oldest are dropped


class TierWait(NamedTuple):
    """The wait of a request for a transfer."""

    ticket: int
    num_cached: int  # tokens that are cached now
    num_tokens: int  # tokens that will be cached afterwards
    since_s: float
    until_s: float
    num_from_host: int = 0  # of these, tokens from the memory of the host


class ReadTokens(NamedTuple):
    """Tokens of a prompt that were read for its request, by store."""

    disk: int
    host: int


class TiersFeature(Feature):
    def __init__(self, settings: TierSettings) -> None:
        self._settings = settings
        self.waiting: dict[int, TierWait] = {}
        self.landed: dict[int, TierWait] = {}  # of open requests whose wait is over
        # Tokens of prompts that were read from disk and from the memory of the host, and were found
        # at admission.
        self.num_hits = 0
        self.num_host_hits = 0
        # Sequences to write, in the order of their use.
        self.worthy: OrderedDict[CacheKey, None] = OrderedDict()

    def num_read_for(self, request: Request) -> ReadTokens:
        """The tokens that were read for a request and that it has found at its admission."""
        wait = self.landed.get(request.id)
        if wait is None:
            return ReadTokens(0, 0)
        found = min(request.prefix.length, wait.num_tokens)
        num_read = max(found - wait.num_cached, 0)
        num_from_host = min(num_read, wait.num_from_host)
        return ReadTokens(num_read - num_from_host, num_from_host)

    def admit(self, request: Request) -> Admission:
        return Admission.WAIT if request.id in self.waiting else Admission.READY

    def why_waits(self, request: Request) -> str:
        wait = self.waiting[request.id]
        longest_ms = 1e3 * (wait.until_s - wait.since_s)
        num_tokens = wait.num_tokens - wait.num_cached
        where = self._settings.where
        return f"{num_tokens:,} tokens are being read from {where}, for {longest_ms:,.0f} ms"

    def enter_row(self, request: Request) -> None:
        read = self.num_read_for(request)
        self.num_hits += read.disk
        self.num_host_hits += read.host
        self.landed.pop(request.id, None)
        # A prefix that a request finds is used twice. A retracted request finds its own tokens.
        if self._settings.write != "selective" or request.retractions:
            return
        self._is_worthy(request.cache_key(request.packed), request.prefix.length)

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self.waiting.pop(request.id, None)
        self.landed.pop(request.id, None)
        if reason == "error" or not request.message.shares_kv:
            return
        write = self._settings.write
        # The next turn of a session will need this one.
        if write == "through" or (write == "selective" and request.message.session is not None):
            num_tokens = len(request.packed) // TOKEN_BYTES
            self._is_worthy(request.cache_key(request.packed), num_tokens)

    def is_worthy_now(self, key: CacheKey) -> None:
        """Write this sequence before all others."""
        num_tokens = key.num_tokens
        worthy = self._is_worthy(key, num_tokens)
        if worthy is not None:
            self.worthy.move_to_end(worthy, last=False)

    def _is_worthy(self, key: CacheKey, num_tokens: int) -> CacheKey | None:
        """Note that the first `num_tokens` of a sequence should be written, as far as they are
        cached. Returns their full blocks; None if there are none."""
        num_tokens -= num_tokens % self._settings.block_len
        if not num_tokens:
            return None
        worthy = key.first(num_tokens)
        self.worthy[worthy] = None
        self.worthy.move_to_end(worthy)
        if len(self.worthy) > MAX_WORTHY:
            self.worthy.popitem(last=False)
        return worthy

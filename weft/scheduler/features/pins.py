"""Requests that pin the beginning of their prompt, or ask how many tokens they got from the caches.

A beginning is pinned as soon as all of it is in the prefix cache, or at the request's end.
`pin_book.py` has the pinned sequences and their durations; `engine/pin_service.py` expires them.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.replies import CacheUsePiece, FinishReason
from weft.scheduler.feature import Feature
from weft.scheduler.features.pin_book import PinBook, WantedPin
from weft.scheduler.features.tiers import ReadTokens, TiersFeature
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request, RequestState
from weft.scheduler.settings import SchedulerSettings

NOT_CACHED = "its KV is not in the cache"


class CacheUse:
    """The use of the caches by an open request."""

    __slots__ = ("pinned_tokens", "read", "why")

    def __init__(self, read: ReadTokens) -> None:
        self.read = read
        self.pinned_tokens = 0
        self.why = ""


class PinsFeature(Feature):
    """The engine sets `wake`, which is called when a request that uses the feature gets a row, and
    `note`, which records an event of a request."""

    request_fields = ("pins", "tells_cache")

    def __init__(
        self,
        settings: SchedulerSettings,
        tiers: TiersFeature | None,
    ) -> None:
        max_pages = int(settings.max_pinned * settings.num_pages)
        self.book = PinBook(max_pages, settings.pin_shares)
        self.wake: Callable[[], None] | None = None
        self.note: Callable[[int, str, float], None] | None = None
        self._tiers = tiers
        self._uses: dict[int, CacheUse] = {}  # of open requests that have had a row
        self.pending: dict[int, Request] = {}  # requests whose beginnings are still to be pinned
        self.ended: dict[int, CacheUsePiece] = {}  # replies to send

    @property
    def has_users(self) -> bool:
        """Whether requests are open that use the feature, and have had a row."""
        return bool(self._uses)

    def enter_row(self, request: Request) -> None:
        if request.id not in self._uses:
            read = ReadTokens(0, 0)
            if self._tiers is not None:
                read = self._tiers.num_read_for(request)
            self._uses[request.id] = CacheUse(read)
            if request.message.pins:
                self.pending[request.id] = request
        if self.wake is not None:
            self.wake()

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        kv: KvMemory,
    ) -> None:
        use = self._uses.get(request.id)
        if use is None:
            return  # it has never had a row
        is_pending = self.pending.pop(request.id, None) is not None
        if is_pending and reason != "error" and not self._pin(request, kv, now):
            self._refuse(request, NOT_CACHED, now)
        del self._uses[request.id]
        self.ended[request.id] = CacheUsePiece(
            id=request.id,
            disk_tokens=use.read.disk,
            host_tokens=use.read.host,
            pinned_tokens=use.pinned_tokens,
            why=use.why,
        )

    def pin_what_is_computed(
        self,
        kv: KvMemory,
        now: float,
    ) -> None:
        """Pin the beginnings that are in the cache now."""
        for id, request in list(self.pending.items()):
            if request.state is RequestState.DECODING and self._pin(request, kv, now):
                del self.pending[id]

    def _pin(
        self,
        request: Request,
        kv: KvMemory,
        now: float,
    ) -> bool:
        """Pin the marked beginnings of a request, the longest first, because it contains the
        others. Returns False if none of them is cached yet."""
        message = request.message
        page_size = kv.page_size
        pinned_s = 0.0  # duration of the longest pin
        is_cached = False
        why = ""
        for mark in reversed(message.pins):
            length = min(mark.length, request.spec.prompt_len)
            length -= length % page_size
            key = request.cache_key(request.packed[: length * TOKEN_BYTES])
            if not length:
                is_cached = True
                why = f"{mark.length:,} tokens are less than a page ({page_size:,})"
                continue
            if kv.cache.peek(key) < length:
                return is_cached
            is_cached = True
            if pinned_s >= mark.ttl_s and not mark.name:
                continue
            wanted = WantedPin(mark.name, message.tenant, key, mark.ttl_s)
            why_not = self.book.use(wanted, kv, now)
            if why_not:
                why = why_not
                continue
            use = self._uses[request.id]
            use.pinned_tokens = max(use.pinned_tokens, length)
            pinned_s = max(pinned_s, mark.ttl_s)
            self._note(request, f"its first {length:,} tokens are pinned, {mark.ttl_s:g} s", now)
        if why:
            self._refuse(request, why, now)
        return True

    def _refuse(
        self,
        request: Request,
        why: str,
        now: float,
    ) -> None:
        self._uses[request.id].why = why
        self._note(request, f"not pinned: {why}", now)

    def _note(
        self,
        request: Request,
        detail: str,
        now: float,
    ) -> None:
        if self.note is not None:
            self.note(request.id, detail, now)

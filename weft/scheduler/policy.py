"""In which order waiting requests are looked at. A policy is a function; `POLICIES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from weft.memory.prefix_cache import TOKEN_BYTES, PrefixCache
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.request import Request

Policy: TypeAlias = Callable[[WaitingQueue, PrefixCache], Iterable[Request]]


def fcfs(queue: WaitingQueue, cache: PrefixCache) -> Iterable[Request]:
    """First come, first served; retracted requests before all others."""
    return queue


def lpm(queue: WaitingQueue, cache: PrefixCache) -> Iterable[Request]:
    """Longest prefix match first, so that what is cached is used before it is evicted. Equal ones as they came."""
    if not cache.shares:
        return queue
    return sorted(queue, key=lambda request: -cache.peek(request.namespace, request.packed))


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm}


class PrefixSharing:
    """Keeps requests of one batch from computing the same new prefix twice (in-batch prefix caching).

    Two requests would do that if their cached prefixes end at the same place and the tokens after it begin alike. The
    first goes; the others wait for the next pass, in which they find its prefix in the cache. One object per pass.
    """

    MIN_SHARED = 32  # tokens that must be alike for the wait to pay

    def __init__(self, cache: PrefixCache) -> None:
        self._shares = cache.shares
        self._span = max(self.MIN_SHARED, cache.page_size) * TOKEN_BYTES
        self._heads: set[tuple[int, bytes]] = set()

    def defers(self, request: Request) -> bool:
        """Whether a request that is picked already computes the beginning of what this one lacks."""
        return self._shares and self._head(request) in self._heads

    def picked(self, request: Request) -> None:
        head = self._head(request)
        if len(head[1]) == self._span:
            self._heads.add(head)

    def _head(self, request: Request) -> tuple[int, bytes]:
        start = request.cached_len * TOKEN_BYTES
        return id(request.handle), request.packed[start : start + self._span]

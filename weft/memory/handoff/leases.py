"""Paths of the prefix cache that are lent to another server for a time, with no request on them.

They are locked: no page of them is evicted. They give way, the oldest first, when they are more
than their share of the pool, and all at once when running requests have no memory left. Whoever
reads the pages is told before any of them can change. Leases know names and keys, never what the
names belong to.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey, Handle, PrefixCache


class Lender(Protocol):
    """Whoever lets others read the pages."""

    def withdraw(self, name: str, why: str) -> None:
        """Nobody reads the pages any more once this returns."""
        ...

    def renew(self, why: str) -> None:
        """What is lent from now on is of other weights."""
        ...


class NoLender:
    def withdraw(self, name: str, why: str) -> None:
        pass

    def renew(self, why: str) -> None:
        pass


class LeaseEnd(NamedTuple):
    """A lease that has ended before it was returned."""

    name: str
    num_tokens: int
    why: str


class Lease:
    """One path, of whole pages. Launched steps may still write them when it begins."""

    __slots__ = ("handle", "key", "name", "num_tokens", "pages", "until_s")

    def __init__(
        self,
        name: str,
        key: CacheKey,
        handle: Handle,
        num_tokens: int,
        pages: list[int],
        until_s: float,
    ) -> None:
        self.name = name
        self.key = key  # of the tokens of its pages
        self.handle = handle
        self.num_tokens = num_tokens
        self.pages = pages
        self.until_s = until_s


class Leases:
    """The leases on one cache, the oldest first. `lender` is set by whoever lends."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._by_name: OrderedDict[str, Lease] = OrderedDict()
        self._uses: Counter[int] = Counter()  # of each page that is lent
        self._ended: list[LeaseEnd] = []
        self.lender: Lender = NoLender()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Lease]:
        """The oldest first."""
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def holds(self, lease: Lease) -> bool:
        """Whether it has not ended."""
        return self._by_name.get(lease.name) is lease

    @property
    def num_pages(self) -> int:
        """Pages that are lent; one with several borrowers counts once."""
        return len(self._uses)

    @property
    def due_s(self) -> float:
        """When the next lease ends."""
        return min((lease.until_s for lease in self._by_name.values()), default=math.inf)

    def begin(self, name: str, key: CacheKey, until_s: float) -> Lease | None:
        """Lock as much of a sequence as is cached; None if nothing is. One of this name that is
        there ends."""
        self.give_back(name, "another request of its room has ended")
        found = self._cache.match(key)
        if not found.length:
            return None
        self._cache.lock(found.handle)
        lent = CacheKey(key.namespace, key.tokens[: found.length * TOKEN_BYTES])
        lease = Lease(name, lent, found.handle, found.length, found.pages.tolist(), until_s)
        self._by_name[name] = lease
        self._uses.update(lease.pages)
        return lease

    def renew(self, name: str, until_s: float) -> None:
        """It is still waited for. Does nothing if it has ended."""
        lease = self._by_name.get(name)
        if lease is not None:
            lease.until_s = until_s

    def give_back(self, name: str, why: str = "it was given back") -> bool:
        """It is not needed any more. Returns whether there was one."""
        lease = self._by_name.pop(name, None)
        if lease is None:
            return False
        self._forget(lease, why)
        self._cache.unlock(lease.handle)
        return True

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        if now < self.due_s:
            return
        for lease in list(self._by_name.values()):
            if lease.until_s <= now:
                self._end(lease.name, "its lease was over")

    def shrink_to(self, num_pages: int) -> None:
        """End the oldest, until no more than `num_pages` are lent, or one lease is left."""
        while self.num_pages > num_pages and len(self._by_name) > 1:
            self._end(next(iter(self._by_name)), "newer ones took its memory")

    def end_all(self, why: str) -> None:
        for name in list(self._by_name):
            self._end(name, why)

    def forget_all(self, why: str) -> None:
        """The cache is dropped as a whole: there is nothing to unlock."""
        for lease in self._by_name.values():
            self._ended.append(LeaseEnd(lease.name, lease.num_tokens, why))
            self._forget(lease, why)
        self._by_name.clear()

    def take_ended(self) -> list[LeaseEnd]:
        """The leases that had to go since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    def _end(self, name: str, why: str) -> None:
        lease = self._by_name.pop(name)
        self._ended.append(LeaseEnd(name, lease.num_tokens, why))
        self._forget(lease, why)
        self._cache.unlock(lease.handle)

    def _forget(self, lease: Lease, why: str) -> None:
        """Before its pages may change: nobody reads them any more."""
        self.lender.withdraw(lease.name, why)
        for page in lease.pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]

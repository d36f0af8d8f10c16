"""Leases: paths of the prefix cache that are lent to another server for a time, without a request.

They are locked: none of their pages is evicted, nor the resume state with which another server can
resume the sequence (`memory/tiers/resume_states.py`). When they exceed their share of the pool, the
oldest end first; when running requests have no memory left, all end at once. The reader of the
pages is stopped before any of them can change. Leases know names and keys, but not the owners of
the names."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from weft.arrays import IntArray
from weft.memory.accounting.holders import Holder, ResumeStateInUse
from weft.memory.prefix_cache import CacheKey, Handle
from weft.memory.radix.cache import RadixCache
from weft.memory.tiers.resume_states import ResumeStates


class Lender(Protocol):
    """Lets other servers read the pages."""

    def withdraw(self, name: str, why: str) -> None:
        """When this returns, the pages are not read any more."""
        ...

    def renew(self, why: str) -> None:
        """Pages that are lent from now on have KV of other weights."""
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
    """One path, of whole pages. Launched steps may still write them when the lease begins."""

    __slots__ = ("handle", "key", "name", "num_tokens", "pages", "resume_state", "until_s")

    def __init__(
        self,
        name: str,
        key: CacheKey,
        handle: Handle,
        num_tokens: int,
        pages: list[int],
        until_s: float,
        resume_state: IntArray,
    ) -> None:
        self.name = name
        self.key = key  # of the tokens of its pages
        self.handle = handle
        self.num_tokens = num_tokens
        self.pages = pages
        self.until_s = until_s
        self.resume_state = resume_state  # slots or pages; empty: it can be resumed without one


class Leases(Holder):
    """The leases on one cache, oldest first. `resume_states`: what its sequences need to be
    resumed."""

    def __init__(self, cache: RadixCache, resume_states: ResumeStates) -> None:
        self._cache = cache
        self._resume_states = resume_states
        self._by_name: OrderedDict[str, Lease] = OrderedDict()
        self._uses: Counter[int] = Counter()  # number of leases of each lent page
        self._ended: list[LeaseEnd] = []
        self._lender: Lender = NoLender()

    def lend_through(self, lender: Lender) -> None:
        """`lender` lets other servers read the pages from now on."""
        self._lender = lender

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Lease]:
        """The leases, oldest first."""
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def holds(self, lease: Lease) -> bool:
        """Whether the lease has not ended."""
        return self._by_name.get(lease.name) is lease

    @property
    def num_pages(self) -> int:
        """Number of lent pages; a page of several leases counts once."""
        return len(self._uses)

    @property
    def resume_state_capacity(self) -> int:
        """Places of all resume states that there may be; 0: sequences have no resume states."""
        return self._resume_states.capacity

    @property
    def num_resume_slots(self) -> int:
        """Number of places of all lent resume states."""
        return sum(len(lease.resume_state) for lease in self._by_name.values())

    @property
    def due_s(self) -> float:
        """When the next lease ends."""
        return min((lease.until_s for lease in self._by_name.values()), default=math.inf)

    def begin(self, name: str, key: CacheKey, until_s: float) -> Lease | None:
        """Lock the cached part of a sequence, up to where it can be resumed; None if nothing is
        cached. Ends an earlier lease of this name."""
        self.give_back(name, "another request of its room has ended")
        lengths = self._resume_states.resumable_lengths(self._cache, key, self._cache.page_size)
        if not lengths:
            return None
        lent = key.first(lengths[-1])
        found = self._cache.match(lent)
        self._cache.lock(found.handle)
        resume_state = self._resume_states.hold(found.handle)
        pages = found.pages.tolist()
        lease = Lease(name, lent, found.handle, found.length, pages, until_s, resume_state)
        self._by_name[name] = lease
        self._uses.update(lease.pages)
        return lease

    def renew(self, name: str, until_s: float) -> None:
        """Extend a lease that is still needed. Does nothing if it has ended."""
        lease = self._by_name.get(name)
        if lease is not None:
            lease.until_s = until_s

    def give_back(self, name: str, why: str = "it was given back") -> bool:
        """End a lease that is not needed any more. Returns whether there was one."""
        lease = self._by_name.pop(name, None)
        if lease is None:
            return False
        self._unlock(lease, why)
        return True

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        if now < self.due_s:
            return
        for lease in list(self._by_name.values()):
            if lease.until_s <= now:
                self._end(lease.name, "its lease was over")

    def shrink_to(self, num_pages: int, num_resume_slots: int) -> None:
        """End the oldest leases, until at most `num_pages` and `num_resume_slots` of resume states
        are lent, or one lease is left."""
        while len(self._by_name) > 1:
            if self.num_pages <= num_pages and self.num_resume_slots <= num_resume_slots:
                break
            self._end(next(iter(self._by_name)), "newer ones took its memory")

    def end_all(self, why: str) -> None:
        for name in list(self._by_name):
            self._end(name, why)

    # As a holder of memory

    def reclaim(self) -> bool:
        self.end_all("its memory was needed")
        return False

    def before_emptying(self, why: str) -> None:
        self.end_all(why)

    def before_reset(self, why: str) -> None:
        for lease in self._by_name.values():
            self._ended.append(LeaseEnd(lease.name, lease.num_tokens, why))
            self._forget(lease, why)
        self._by_name.clear()

    def weights_changed(self, why: str) -> None:
        self._lender.renew(why)

    def resume_states_in_use(self) -> Iterator[ResumeStateInUse]:
        for lease in self._by_name.values():
            yield ResumeStateInUse(f"lease {lease.name}", lease.resume_state, is_reserved=False)

    # Reports

    def take_ended(self) -> list[LeaseEnd]:
        """The leases that ended early since the last call."""
        ended = self._ended
        self._ended = []
        return ended

    def _end(self, name: str, why: str) -> None:
        lease = self._by_name.pop(name)
        self._ended.append(LeaseEnd(name, lease.num_tokens, why))
        self._unlock(lease, why)

    def _unlock(self, lease: Lease, why: str) -> None:
        self._forget(lease, why)
        self._resume_states.let_go(lease.handle, lease.resume_state)
        self._cache.unlock(lease.handle)

    def _forget(self, lease: Lease, why: str) -> None:
        """Called before its pages may change: stop all reads of them."""
        self._lender.withdraw(lease.name, why)
        for page in lease.pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]

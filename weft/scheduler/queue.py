"""Requests that wait, and who of them is looked at first.

Requests that were taken back go before all others, as they came (unless the policy ranks them). Then the policy
decides, but not alone: of the requests that have waited longer than `aging_s`, the oldest gets every fourth turn. So no
policy that ages starves anybody: once a request is overdue, at most three others that never ran are admitted before it
for each one that is older, whatever comes later. (`fair` ages within each tenant by itself.)

Requests that came while the input was blocked stand in the queue, but nobody looks at them (`block`, `unblock`).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator

import numpy as np

from weft.arrays import IntArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.memory.prefix_cache import TOKEN_BYTES, PrefixCache
from weft.scheduler.policy import TURNS, Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class WaitingQueue:
    """`aging_s`: after so many seconds a request is overdue; 0: never."""

    def __init__(self, policy: Policy, cache: PrefixCache, aging_s: float = 0.0) -> None:
        self._cache = cache
        self._aging_s = aging_s
        self._waiting = WaitingTable()
        self._resumed: list[Request] = []  # taken back: few, sorted by arrival
        self._since_overdue = 0  # admissions since the last that was an overdue request's turn
        self._turns: set[int] = set()  # whom the last order gave such a turn, by id
        self._blocked_from: int | None = None  # number of the first arrival that is held back
        self.num_tokens = 0  # of the prompts of all that never ran
        self.use(policy)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._resumed)

    def __iter__(self) -> Iterator[Request]:
        """As they came; those that were taken back before all others."""
        yield from self._resumed
        yield from self._waiting

    def retractions_of_first(self, now: float) -> int:
        """How often the first of all was taken back."""
        first = next(self.order(now), None) if self._resumed else None
        return 0 if first is None else first.retractions

    def use(self, policy: Policy) -> None:
        """Order by this policy from now on. If it raises, the one before stays."""
        before, listener, notes = (
            getattr(self, "policy", None),
            self._cache.listener,
            self._waiting.notes(),
        )
        self.policy = policy
        try:
            self._watch_anew()
            for request in self._waiting:
                self._waiting.set_tag(request.arrival_order, policy.arrived(request))
        except BaseException:
            if before is not None:
                self.policy, self._cache.listener = before, listener
            self._waiting.restore(notes)
            raise

    def begin_anew(self, policy: Policy, requests: Iterable[Request]) -> None:
        """These wait, and nobody else, in the order of a policy that has seen none of them. Reads nothing that a fault
        may have spoilt; who is held back, stays so."""
        self._waiting = WaitingTable()
        self._resumed = []
        self._turns = set()
        self._since_overdue = 0
        self.num_tokens = 0
        for request in sorted(requests, key=lambda one: one.arrival_order):
            if request.admitted_s >= 0 or request.goes_first:
                self._resumed.append(request)
            else:
                self._waiting.append(request)
                self.num_tokens += request.fill_len
        self.use(policy)

    # Requests come and go

    def append(self, request: Request) -> None:
        """All of it, or, if anything raises, nothing."""
        self.num_tokens += request.fill_len
        try:
            self._waiting.append(request)
            if self.policy.prefix_index is not None:
                self._watch(self.policy.prefix_index, request)
            self._waiting.set_tag(request.arrival_order, self.policy.arrived(request))
        except BaseException:
            self._forget(request)
            raise

    def overflow(self, newcomer: Request, max_requests: int, max_tokens: int) -> list[Request]:
        """Who is refused, now that `newcomer` has been appended to a queue of at most so many requests, and tokens of
        those that never ran (0: any number; who waits alone may have more).

        Nobody while it fits. Else as many as it takes of those that the policy lets go for the newcomer; and the
        newcomer, if there are none, or if that would not do.
        """
        num_over = len(self) - max_requests
        tokens_over = self.num_tokens - max_tokens if max_tokens and len(self) > 1 else 0
        losers: list[Request] = []
        for loser in self._displaced(newcomer) if num_over > 0 or tokens_over > 0 else ():
            losers.append(loser)
            num_over -= 1
            tokens_over -= loser.fill_len
            if num_over <= 0 and tokens_over <= 0:
                break
        return losers if num_over <= 0 and tokens_over <= 0 else [newcomer]

    def _displaced(self, newcomer: Request) -> Iterator[Request]:
        return self.policy.displaced(self._waiting, self._waiting.lines(), newcomer)

    def resume(self, request: Request) -> None:
        """Take a request back. It keeps the place that its arrival gave it, before all that never ran."""
        insort(self._resumed, request, key=lambda other: other.arrival_order)

    def admit(self, request: Request) -> None:
        """The request has got a row: it waits no more."""
        never_ran = self._take_out(request)
        if request.id in self._turns:
            self._since_overdue = 0
        elif never_ran or not self.policy.resumes_first:
            self._since_overdue += 1
        self.policy.admitted(request)

    def remove(self, request: Request) -> None:
        """The request ends while it waits."""
        if self._take_out(request):
            self.policy.dropped(request)

    def is_overdue(self, request: Request, now: float) -> bool:
        return 0 < self._aging_s <= now - request.arrival_s

    # Holding back

    def block(self, arrival_order: int) -> None:
        """Do not look at requests that never ran, from this number of arrival on."""
        if self._blocked_from is None:
            self._blocked_from = arrival_order

    def unblock(self) -> None:
        """Look at all requests again: those that were held back stand where their arrival has put them."""
        self._blocked_from = None

    def blocked(self) -> Iterator[Request]:
        """The requests that are held back, as they came."""
        first = self._blocked_from
        if first is not None:
            yield from (request for request in self._waiting if request.arrival_order >= first)

    @property
    def blocks_arrivals(self) -> bool:
        """Whether requests that come now are held back."""
        return self._blocked_from is not None

    @property
    def has_candidates(self) -> bool:
        """Whether there is anybody to look at."""
        if self._blocked_from is None or self._resumed:
            return len(self) > 0
        first = next(iter(self._waiting), None)
        return first is not None and first.arrival_order < self._blocked_from

    @property
    def num_candidates(self) -> int:
        """How many there are to look at."""
        return len(self._resumed) + len(self._candidates())

    def is_blocked(self, request: Request) -> bool:
        first = self._blocked_from
        return first is not None and request.arrival_order >= first and request in self._waiting

    def _candidates(self) -> IntArray:
        """The lines [n] of requests that never ran and are not held back, in the order of arrival."""
        lines = self._waiting.lines()
        if self._blocked_from is None:
            return lines
        return lines[: int(np.searchsorted(self._waiting.arrival_order[lines], self._blocked_from))]

    # Who is next

    def order(self, now: float) -> Iterator[Request]:
        """The waiting requests, best first. Lazy: it may be left at any request."""
        policy = self.policy
        lines = self._candidates()
        fresh = policy.order(self._waiting, lines, now)
        if (
            self._blocked_from is not None
        ):  # a policy may walk the tree, and find there what is not in `lines`
            fresh = (
                request for request in fresh if request.arrival_order < (self._blocked_from or 0)
            )
        overdue: Iterator[Request]
        if policy.resumes_first:
            yield from self._resumed
            overdue = map(self._waiting.at, lines[: self._num_overdue(lines, now)])
        else:
            ranked = sorted(self._resumed, key=policy.rank)
            fresh = heapq.merge(ranked, fresh, key=policy.rank)
            resumed = (request for request in self._resumed if self.is_overdue(request, now))
            old = map(self._waiting.at, lines[: self._num_overdue(lines, now)])
            overdue = heapq.merge(resumed, old, key=lambda request: request.arrival_order)
        yield from self._in_turns(overdue, fresh)

    def _in_turns(self, overdue: Iterator[Request], fresh: Iterator[Request]) -> Iterator[Request]:
        """`fresh`, with the next of `overdue` at every fourth place."""
        seen: set[int] = set()
        turns: set[int] = set()
        self._turns = turns
        since = self._since_overdue
        for request in fresh:
            if since >= TURNS - 1:
                oldest = next((old for old in overdue if old.id not in seen), None)
                if oldest is not None:
                    seen.add(oldest.id)
                    turns.add(oldest.id)
                    since = 0
                    yield oldest
            if request.id not in seen:
                seen.add(request.id)
                since += 1
                yield request

    def _num_overdue(self, lines: IntArray, now: float) -> int:
        """The first so many of `lines` have waited too long."""
        if not self._aging_s or not self.policy.ages:
            return 0
        return int(
            np.searchsorted(self._waiting.arrival_s[lines], now - self._aging_s, side="right")
        )

    # Inside

    def _watch_anew(self) -> None:
        """Keep the cached lengths of all waiting requests true from now on, if the policy reads them."""
        policy, cache = self.policy, self._cache
        if policy.reads_cache and cache.shares:
            policy.subtree_counts = SubtreeCounts() if policy.weighs else None
            policy.prefix_index = PrefixIndex(
                cache, self._waiting.set_cached_len, policy.subtree_counts
            )
            for request in self._waiting:
                self._watch(policy.prefix_index, request)
        cache.listener = policy.prefix_index

    def _watch(self, watch: PrefixIndex, request: Request) -> None:
        end = request.reusable_len * TOKEN_BYTES
        length = watch.add(request.arrival_order, request.namespace, request.packed, end)
        self._waiting.set_cached_len(request.arrival_order, length)

    def _forget(self, request: Request) -> None:
        """The request could not be appended: nothing is left of what that has done."""
        self.num_tokens -= request.fill_len
        if request in self._waiting:
            self._waiting.remove(request)
        self.policy.dropped(request)
        self._watch_anew()

    def _take_out(self, request: Request) -> bool:
        """Returns whether it had never run."""
        if request not in self._waiting:
            self._resumed.remove(request)
            return False
        self._waiting.remove(request)
        self.num_tokens -= request.fill_len
        if self.policy.prefix_index is not None:
            self.policy.prefix_index.remove(request.arrival_order)
        return True

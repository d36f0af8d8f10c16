"""The waiting requests of one class of service, in the order of one policy.

Retracted requests go before all others, in order of arrival (unless the policy has classes). The
policy orders the rest, except that the oldest of the requests that have waited longer than
`aging_s` gets every fourth turn. (`fair` ages requests within each tenant by itself.) `queue.py`
puts the lines one after the other.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain

from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.cache import RadixCache
from weft.scheduler.policies.protocol import AgingTurns, Policy, RequestClasses, RequestFollower
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, WaitingTable


class CachedLens:
    """How much of each waiting request is cached, kept up to date while a policy reads it from a
    cache that shares."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self.index: PrefixIndex | None = None  # None: no policy reads it

    def start(self, policy: Policy, table: WaitingTable) -> None:
        """Follow the cache for the requests of a table, if the policy reads their lengths."""
        self.index = None
        if not policy.reads_cache or not self._cache.shares:
            return
        counts = policy.new_counts()
        self.index = PrefixIndex(self._cache, table.set_cached_len, counts)
        policy.use_index(self.index, counts)
        for request in table:
            self.add(request, table)
        self._cache.tree.listeners.append(self.index)

    def add(self, request: Request, table: WaitingTable) -> None:
        """A request has joined the table."""
        if self.index is None:
            return
        key = request.cache_key(request.packed)
        arrival_order = request.spec.arrival_order
        length = self.index.add(arrival_order, key, request.reusable_len * TOKEN_BYTES)
        table.set_cached_len(arrival_order, length)

    def stop(self) -> None:
        """Stop following the changes of the cache."""
        if self.index in self._cache.tree.listeners:
            self._cache.tree.listeners.remove(self.index)

    def go_on_with(self, index: PrefixIndex | None) -> None:
        """Follow the cache again with an index that was stopped."""
        self.index = index
        if index is not None:
            self._cache.tree.listeners.append(index)


class WaitingLine:
    """The waiting requests of one class of service, in the order of one policy. A request that has
    waited `aging_s` seconds is overdue; 0: never, and then there is no `AgingTurns`."""

    def __init__(self, policy: Policy, cache: RadixCache, aging_s: float = 0.0) -> None:
        self._aging_s = aging_s
        self._waiting = WaitingTable()  # requests that never ran
        self.resumed: list[Request] = []  # retracted requests: few, sorted by arrival
        self._turns = AgingTurns() if aging_s else None
        # No request of this line can be admitted before a request ends.
        self.is_full = False
        self.num_tokens = 0  # of the prompts of all requests that never ran
        self.cached_lens = CachedLens(cache)
        self.policy = policy
        self._start_policy()

    def __len__(self) -> int:
        return len(self._waiting) + len(self.resumed)

    def __iter__(self) -> Iterator[Request]:
        """All requests in order of arrival; retracted ones before all others."""
        yield from self.resumed
        yield from self._waiting

    def first_come(self, num: int) -> list[Request]:
        """The first `num` requests in order of arrival, retracted ones before all others. The
        policy is not used."""
        found = self.resumed[:num]
        indices = self._waiting.indices()[: num - len(found)]
        return found + [self._waiting.request_at(index) for index in indices.tolist()]

    def use(self, policy: Policy) -> None:
        """Order by this policy from now on. If it raises, the previous policy stays."""
        before = self.policy
        index_before = self.cached_lens.index
        columns = self._waiting.policy_columns()
        self.cached_lens.stop()
        self.policy = policy
        try:
            self._start_policy()
        except BaseException:
            self.cached_lens.stop()
            self.policy = before
            self.cached_lens.go_on_with(index_before)
            self._waiting.restore(columns)
            raise
        if self._turns is not None:
            self._turns.forget_turns()

    def tags(self) -> dict[int, int]:
        """The policy's tag of each waiting request, by its arrival order."""
        return self._waiting.tags()

    def go_on_with(self, policy: Policy, tags: dict[int, int]) -> None:
        """Order by a policy that knows the waiting requests and has given them these tags."""
        self.cached_lens.stop()
        self.policy = policy
        self.cached_lens.start(policy, self._waiting)
        for arrival_order, tag in tags.items():
            self._waiting.set_tag(arrival_order, tag)

    def begin_anew(self, policy: Policy, requests: Iterable[Request]) -> None:
        """Replace all waiting requests by these, ordered by a policy that has seen none of them.

        Reads no state that a fault may have damaged.
        """
        self._waiting = WaitingTable()
        self.resumed = []
        self._turns = AgingTurns() if self._aging_s else None
        self.num_tokens = 0
        for request in sorted(requests, key=lambda one: one.spec.arrival_order):
            if request.admitted_s >= 0 or request.spec.goes_first:
                self.resumed.append(request)
            else:
                self._waiting.append(request)
                self.num_tokens += request.fill_len
        self.use(policy)

    # Requests come and go

    def append(self, request: Request) -> None:
        """Add a request completely, or, if anything raises, not at all."""
        self.num_tokens += request.fill_len
        try:
            self._waiting.append(request)
            if self.cached_lens.index is not None:
                self.cached_lens.add(request, self._waiting)
            if self.policy.follower is not None:
                self._introduce(self.policy.follower, request)
        except BaseException:
            self._forget(request)
            raise

    def overflow(self, newcomer: Request, max_requests: int, max_tokens: int) -> list[Request]:
        """The requests to refuse, now that `newcomer` has joined a queue with these limits.

        `max_tokens` limits the sum of the prompts of requests that never ran (0: no limit); a
        request that waits alone may have more. Returns none while all fit. Otherwise returns as
        many requests as necessary of those that the policy displaces for the newcomer; or the
        newcomer, if these are too few.
        """
        requests_over = len(self) - max_requests
        tokens_over = 0
        if max_tokens and len(self) > 1:
            tokens_over = self.num_tokens - max_tokens
        losers: list[Request] = []
        if requests_over <= 0 and tokens_over <= 0:
            return losers
        displaced: Iterator[Request] = iter(())
        if self.policy.displacement is not None:
            displaced = self.policy.displacement.displaced(
                self._waiting, self._waiting.indices(), newcomer
            )
        for loser in displaced:
            losers.append(loser)
            requests_over -= 1
            tokens_over -= loser.fill_len
            if requests_over <= 0 and tokens_over <= 0:
                return losers
        return [newcomer]

    def resume(self, request: Request) -> None:
        """Add a retracted request, at the position of its arrival."""
        insort(self.resumed, request, key=lambda other: other.spec.arrival_order)

    def admit(self, request: Request) -> None:
        """The request has got a row: it no longer waits."""
        never_ran = self._take_out(request)
        policy = self.policy
        if self._turns is not None:
            # Without classes a resumed request goes before all turns; with them it takes one.
            self._turns.admitted(request, counts=never_ran or policy.classes is not None)
        if policy.follower is not None:
            policy.follower.admitted(request)

    def remove(self, request: Request) -> None:
        """The request has ended while it waited."""
        never_ran = self._take_out(request)
        if never_ran and self.policy.follower is not None:
            self.policy.follower.dropped(request)

    # What the next pass may look at. `end` is the arrival order of the first blocked request.

    def has_candidates(self, end: int) -> bool:
        """Whether there is a request that is not blocked."""
        if self.resumed:
            return True
        if end == EVERYBODY:
            return len(self._waiting) > 0
        first = self._waiting.first()
        return first is not None and first.spec.arrival_order < end

    def num_candidates(self, end: int) -> int:
        """Number of requests that are not blocked."""
        if end == EVERYBODY:
            return len(self)
        return len(self.resumed) + len(self._waiting.indices_before(end))

    def oldest(self, end: int) -> Request | None:
        """The oldest request that is not blocked; None if there is none."""
        if self.resumed:
            return self.resumed[0]
        waiting = self._waiting
        if not len(waiting):
            return None
        first = waiting.request_at(int(waiting.used.flags.argmax()))
        return first if first.spec.arrival_order < end else None

    def never_ran(self, request: Request) -> bool:
        """Whether a request waits here that never had a row."""
        return request in self._waiting

    def newcomers(self) -> Iterator[Request]:
        """The requests that never had a row, in order of arrival."""
        return iter(self._waiting)

    # The order

    def order(self, now: float, end: int = EVERYBODY) -> Iterator[Request]:
        """The requests that are not blocked, best first. Lazy: the caller may stop at any
        request."""
        policy = self.policy
        if self.cached_lens.index is not None:
            self.cached_lens.index.move_on()
        fresh = policy.order_waiting(self._waiting, end, now)
        if policy.classes is not None:
            return self._order_by_class(policy.classes, fresh, end, now)
        if self._turns is not None and policy.ages:
            oldest = self._waiting.came_by(now - self._aging_s, end)
            fresh = self._turns.interleave(oldest, fresh)
        return chain(self.resumed, fresh)

    def look(self) -> None:
        """No order is needed now: let the policy bring its own order up to date."""
        self.policy.look(self._waiting)

    def _order_by_class(
        self, classes: RequestClasses, fresh: Iterator[Request], end: int, now: float
    ) -> Iterator[Request]:
        """Resumed requests go first in their class; an overdue request goes before all classes."""
        resumed = sorted(self.resumed, key=classes.rank)
        ranked = heapq.merge(resumed, fresh, key=classes.rank)
        if self._turns is None:
            return ranked
        oldest: Iterator[Request] = iter(())
        if self.policy.ages:
            oldest = self._waiting.came_by(now - self._aging_s, end)
        resumed = [one for one in self.resumed if 0 < self._aging_s <= now - one.spec.arrival_s]
        overdue = heapq.merge(resumed, oldest, key=lambda one: one.spec.arrival_order)
        return self._turns.interleave(overdue, ranked)

    # Inside

    def _start_policy(self) -> None:
        """Introduce the waiting requests to a policy that has seen none of them."""
        self.cached_lens.start(self.policy, self._waiting)
        follower = self.policy.follower
        if follower is not None:
            for request in self._waiting:
                self._introduce(follower, request)

    def _introduce(self, follower: RequestFollower, request: Request) -> None:
        """Introduce a request that begins to wait to a policy that keeps an account."""
        self._waiting.set_tag(request.spec.arrival_order, follower.arrived(request))

    def _forget(self, request: Request) -> None:
        """Undo the parts of an `append` that raised."""
        self.num_tokens -= request.fill_len
        self._waiting.discard(request)
        if self.policy.follower is not None:
            self.policy.follower.dropped(request)
        self.cached_lens.stop()
        self.cached_lens.start(self.policy, self._waiting)

    def _take_out(self, request: Request) -> bool:
        """Remove a request. Returns whether it had never run."""
        if not self._waiting.discard(request):
            self.resumed.remove(request)
            return False
        self.num_tokens -= request.fill_len
        if self.cached_lens.index is not None:
            self.cached_lens.index.remove(request.spec.arrival_order)
        return True

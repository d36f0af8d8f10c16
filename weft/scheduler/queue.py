"""Requests that wait, and the order in which they are looked at.

Retracted requests go before all others, as they came (unless the policy has classes). Then the
policy decides, but not alone: of the requests that have waited longer than `aging_s`, the oldest
gets every fourth turn. (`fair` ages within each tenant by itself.) The queue knows requests and
policies; it does not know why a request is admitted, or what runs.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain

from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.prefix_cache import TOKEN_BYTES, PrefixCache
from weft.scheduler.policy import TURNS, Policy, RequestClasses, RequestFollower
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, WaitingTable


class AgingTurns:
    """Gives every fourth admission to the oldest overdue request, so that no policy starves one.

    From the moment at which a request is overdue:

        f f f O f f f O f f f O        f: the policy's next, O: the oldest that is overdue

    With k older requests in the queue it is the O of turn k + 1 at the latest: at most
    TURNS * (k + 1) admissions of requests that never ran, whatever arrives later.
    """

    def __init__(self) -> None:
        self.num_since = 0  # admissions since the last that was an overdue request's turn
        self._turns: set[int] = set()  # ids of the requests that the last order gave such a turn

    def interleave(self, overdue: Iterator[Request], fresh: Iterator[Request]) -> Iterator[Request]:
        """`fresh`, with the next of `overdue`, oldest first, at every fourth position."""
        seen: set[int] = set()
        turns: set[int] = set()
        self._turns = turns
        num_since = self.num_since
        for request in fresh:
            if num_since >= TURNS - 1:
                oldest = _first_unseen(overdue, seen)
                if oldest is not None:
                    seen.add(oldest.id)
                    turns.add(oldest.id)
                    num_since = 0
                    yield oldest
            if request.id not in seen:
                seen.add(request.id)
                num_since += 1
                yield request

    def forget_turns(self) -> None:
        """Another policy makes the next order."""
        self._turns = set()

    def admitted(self, request: Request, *, counts: bool) -> None:
        """A request got a row. `counts`: it did so in its turn, not because it was retracted."""
        if request.id in self._turns:
            self.num_since = 0
        elif counts:
            self.num_since += 1


class ArrivalGate:
    """Blocks the requests that arrive from some moment on: they stand in the queue, unlooked at."""

    def __init__(self, arrival_order: int) -> None:
        self.blocked_from = arrival_order  # of the first that is blocked

    def lets_pass(self, request: Request) -> bool:
        return request.spec.arrival_order < self.blocked_from


class WaitingQueue:
    """Requests with `aging_s` seconds of waiting are overdue; 0: never.

    What is off costs nothing: without `aging_s` there are no turns, and without a blocked input no
    gate.
    """

    def __init__(self, policy: Policy, cache: PrefixCache, aging_s: float = 0.0) -> None:
        self._cache = cache
        self._aging_s = aging_s
        self._waiting = WaitingTable()  # those that never ran
        self.resumed: list[Request] = []  # retracted ones: few, sorted by arrival
        self._turns = AgingTurns() if aging_s else None
        self._gate: ArrivalGate | None = None  # while it blocks
        self.num_tokens = 0  # of the prompts of all that never ran
        self.policy = policy
        self._start_policy()

    def __len__(self) -> int:
        return len(self._waiting) + len(self.resumed)

    def __iter__(self) -> Iterator[Request]:
        """As they came; those that were retracted before all others."""
        yield from self.resumed
        yield from self._waiting

    def first_come(self, num: int) -> list[Request]:
        """The first `num` as they came; those that were retracted before all others. Asks no
        policy."""
        found = self.resumed[:num]
        indices = self._waiting.indices()[: num - len(found)]
        return found + [self._waiting.request_at(index) for index in indices.tolist()]

    def retractions_of_first(self, now: float) -> int:
        """How often the first of all was retracted."""
        first = next(self.order(now), None)
        return 0 if first is None else first.retractions

    def use(self, policy: Policy) -> None:
        """Order by this policy from now on. If it raises, the one before stays."""
        before = self.policy
        columns = self._waiting.policy_columns()
        self.stop_index()
        self.policy = policy
        try:
            self._start_policy()
        except BaseException:
            self.stop_index()
            self.policy = before
            if before.prefix_index is not None:
                self._cache.listeners.append(before.prefix_index)
            self._waiting.restore(columns)
            raise
        if self._turns is not None:
            self._turns.forget_turns()

    def tags(self) -> dict[int, int]:
        """What the policy has written beside each waiting request, by its arrival order."""
        return self._waiting.tags()

    def go_on_with(self, policy: Policy, tags: dict[int, int]) -> None:
        """Order by a policy that knows the waiting requests: it has given them these tags."""
        self.stop_index()
        self.policy = policy
        self._start_index()
        for arrival_order, tag in tags.items():
            self._waiting.set_tag(arrival_order, tag)

    def begin_anew(self, policy: Policy, requests: Iterable[Request]) -> None:
        """Let these wait, and no others, in the order of a policy that has seen none of them.

        Reads nothing that a fault may have spoilt; who is blocked, stays so.
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
        """All of it, or, if anything raises, nothing."""
        self.num_tokens += request.fill_len
        try:
            self._waiting.append(request)
            if self.policy.prefix_index is not None:
                self._index(self.policy.prefix_index, request)
            if self.policy.follower is not None:
                self._introduce(self.policy.follower, request)
        except BaseException:
            self._forget(request)
            raise

    def overflow(self, newcomer: Request, max_requests: int, max_tokens: int) -> list[Request]:
        """The requests to refuse, now that `newcomer` has joined a queue with these limits.

        `max_tokens` counts the prompts of those that never ran (0: no limit); a request that waits
        alone may have more. None while all fit. Else as many as it takes of those that the policy
        lets go for the newcomer; or the newcomer, if the policy names too few.
        """
        requests_over = len(self) - max_requests
        tokens_over = 0
        if max_tokens and len(self) > 1:
            tokens_over = self.num_tokens - max_tokens
        losers: list[Request] = []
        if requests_over <= 0 and tokens_over <= 0:
            return losers
        for loser in self._displaced(newcomer):
            losers.append(loser)
            requests_over -= 1
            tokens_over -= loser.fill_len
            if requests_over <= 0 and tokens_over <= 0:
                return losers
        return [newcomer]

    def resume(self, request: Request) -> None:
        """Take a retracted request in, at the position that its arrival gives it."""
        insort(self.resumed, request, key=lambda other: other.spec.arrival_order)

    def admit(self, request: Request) -> None:
        """The request has got a row: it waits no more."""
        never_ran = self._take_out(request)
        policy = self.policy
        if self._turns is not None:
            # Without classes a resumed request goes before all turns; with them it takes one.
            self._turns.admitted(request, counts=never_ran or policy.classes is not None)
        if policy.follower is not None:
            policy.follower.admitted(request)

    def remove(self, request: Request) -> None:
        """The request ends while it waits."""
        never_ran = self._take_out(request)
        if never_ran and self.policy.follower is not None:
            self.policy.follower.dropped(request)

    def rank(self, request: Request) -> int:
        """Class of a request under the policy; 0 if it has none. Lower ones go first."""
        classes = self.policy.classes
        return 0 if classes is None else classes.rank(request)

    def is_overdue(self, request: Request, now: float) -> bool:
        return 0 < self._aging_s <= now - request.spec.arrival_s

    # Blocking

    def block(self, arrival_order: int) -> None:
        """Do not look at requests that never ran, from this arrival on.

        A queue that blocks already goes on as it does.
        """
        if self._gate is None:
            self._gate = ArrivalGate(arrival_order)

    def unblock(self) -> None:
        """Look at all requests again: blocked ones have kept the position of their arrival."""
        self._gate = None

    def blocked(self) -> Iterator[Request]:
        """The requests that are blocked, as they came."""
        for request in self._waiting:
            if self.is_blocked(request):
                yield request

    def is_blocked(self, request: Request) -> bool:
        if self._gate is None or self._gate.lets_pass(request):
            return False
        return request in self._waiting

    @property
    def blocks_arrivals(self) -> bool:
        """Whether requests that come now are blocked."""
        return self._gate is not None

    @property
    def has_candidates(self) -> bool:
        """Whether there is a request to look at."""
        if self.resumed:
            return True
        if self._gate is None:
            return len(self._waiting) > 0
        first = self._waiting.first()
        return first is not None and self._gate.lets_pass(first)

    @property
    def num_candidates(self) -> int:
        """Requests to look at."""
        if self._gate is None:
            return len(self)
        return len(self.resumed) + len(self._waiting.indices_before(self._gate.blocked_from))

    @property
    def oldest(self) -> Request | None:
        """The first that came of the requests to look at."""
        if self.resumed:
            return self.resumed[0]
        waiting = self._waiting
        if not len(waiting):
            return None
        first = waiting.request_at(int(waiting.is_used.argmax()))
        if self._gate is None or self._gate.lets_pass(first):
            return first
        return None

    # The order

    def order(self, now: float) -> Iterator[Request]:
        """The waiting requests, best first. Lazy: it may be left at any request."""
        policy = self.policy
        if policy.prefix_index is not None:
            policy.prefix_index.move_on()
        end = EVERYBODY if self._gate is None else self._gate.blocked_from
        fresh = policy.order_waiting(self._waiting, end, now)
        if policy.classes is not None:
            return self._order_by_class(policy.classes, fresh, end, now)
        if self._turns is not None and policy.ages:
            oldest = self._waiting.came_by(now - self._aging_s, end)
            fresh = self._turns.interleave(oldest, fresh)
        return chain(self.resumed, fresh)

    def look(self) -> None:
        """Nobody is asked for now: what has changed is put in order."""
        self.policy.look(self._waiting)

    def _order_by_class(
        self, classes: RequestClasses, fresh: Iterator[Request], end: int, now: float
    ) -> Iterator[Request]:
        """Resumed requests go first in their class; one that is overdue goes before all classes."""
        resumed = sorted(self.resumed, key=classes.rank)
        ranked = heapq.merge(resumed, fresh, key=classes.rank)
        if self._turns is None:
            return ranked
        oldest: Iterator[Request] = iter(())
        if self.policy.ages:
            oldest = self._waiting.came_by(now - self._aging_s, end)
        overdue = heapq.merge(
            self._overdue_resumed(now), oldest, key=lambda one: one.spec.arrival_order
        )
        return self._turns.interleave(overdue, ranked)

    def _overdue_resumed(self, now: float) -> Iterator[Request]:
        for request in self.resumed:
            if self.is_overdue(request, now):
                yield request

    # Inside

    def _start_policy(self) -> None:
        """Introduce the waiting requests to a policy that has seen none of them."""
        self._start_index()
        follower = self.policy.follower
        if follower is not None:
            for request in self._waiting:
                self._introduce(follower, request)

    def _introduce(self, follower: RequestFollower, request: Request) -> None:
        """A request begins to wait, for a policy that keeps an account."""
        self._waiting.set_tag(request.spec.arrival_order, follower.arrived(request))

    def _start_index(self) -> None:
        """Keep the cached lengths of all waiting requests true, if the policy reads them."""
        policy = self.policy
        cache = self._cache
        if not policy.reads_cache or not cache.shares:
            return
        policy.subtree_counts = policy.new_counts()
        index = PrefixIndex(cache, self._waiting.set_cached_len, policy.subtree_counts)
        policy.prefix_index = index
        for request in self._waiting:
            self._index(index, request)
        cache.listeners.append(index)

    def stop_index(self) -> None:
        """Let the policy's index hear of changes of the cache no more."""
        index = self.policy.prefix_index
        if index in self._cache.listeners:
            self._cache.listeners.remove(index)

    def _index(self, index: PrefixIndex, request: Request) -> None:
        key = request.cache_key(request.packed)
        length = index.add(request.spec.arrival_order, key, request.reusable_len * TOKEN_BYTES)
        self._waiting.set_cached_len(request.spec.arrival_order, length)

    def _displaced(self, newcomer: Request) -> Iterator[Request]:
        displacement = self.policy.displacement
        if displacement is None:
            return iter(())
        return displacement.displaced(self._waiting, self._waiting.indices(), newcomer)

    def _forget(self, request: Request) -> None:
        """The request could not be appended: nothing is left of what that has done."""
        self.num_tokens -= request.fill_len
        self._waiting.discard(request)
        if self.policy.follower is not None:
            self.policy.follower.dropped(request)
        self.stop_index()
        self._start_index()

    def _take_out(self, request: Request) -> bool:
        """Returns whether it had never run."""
        if not self._waiting.discard(request):
            self.resumed.remove(request)
            return False
        self.num_tokens -= request.fill_len
        if self.policy.prefix_index is not None:
            self.policy.prefix_index.remove(request.spec.arrival_order)
        return True


def _first_unseen(requests: Iterator[Request], seen: set[int]) -> Request | None:
    for request in requests:
        if request.id not in seen:
            return request
    return None

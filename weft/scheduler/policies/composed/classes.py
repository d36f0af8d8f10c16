"""Classes of requests with an order inside each class: `priority > X`.

Each class has a policy of its own, so that the accounts of `fair` count only the service within the
class. Who may use a higher class is not a matter of fairness.

**Bounds.** Unless X is `fair`, the oldest overdue request of all classes gets every fourth
admission (`waiting/queue.py`). Under `fair` that would give one tenant the turn of another. So the
class of the oldest overdue request gets every fourth admission, and `fair` chooses the request: a
class with an overdue request is served within 4 * (k + 1) admissions, where k older requests wait
in other classes. Between two tenants of a class the bound of `policies/kinds/fair.py` holds, for
the service that they get in that class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from weft.arrays import LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policies.aging import AgingTurns
from weft.scheduler.policies.kinds.priority import Priority
from weft.scheduler.policies.lanes.lanes import Lanes, requests_of
from weft.scheduler.policies.protocol import Policy, PolicyContext, RequestFollower
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable, chosen

MAX_SCANS = 16  # classes that are found one by one, each by a scan of all requests


class PolicyFactory(Protocol):
    def make(self, context: PolicyContext) -> Policy:
        """A new policy: one for each class."""
        ...


class Classes(Policy):
    """A higher class goes first, and its requests may retract running requests far below it."""

    def __init__(
        self,
        context: PolicyContext,
        inside: PolicyFactory,
    ) -> None:
        super().__init__(context)
        self._inside = inside
        self._priority = Priority(context)
        self._plain = inside.make(context)  # for classes without requests, or without accounts
        self._keeps_account = self._plain.follower is not None
        self._policies: dict[int, Policy] = {}  # by class, if policies keep accounts
        # ids of the open requests by class, if policies keep accounts
        self._open: dict[int, set[int]] = {}
        self._turns = AgingTurns()  # turns of classes
        self.reads_cache = self._plain.reads_cache
        self.ages = not self._plain.ages_within
        self.classes = self._priority
        self.displacement = self
        if self._keeps_account:
            self.follower = self
        self._lanes: Lanes | None = None
        self._by_age = Lanes((), self._rank_of)
        keys = self._plain.lane_keys()
        if keys is not None:
            self._lanes = Lanes(keys, self._rank_of)

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        super().use_index(index, counts)
        for policy in (self._plain, *self._policies.values()):
            policy.use_index(index, counts)

    def new_counts(self) -> SubtreeCounts | None:
        return self._plain.new_counts()

    # Events of a request

    def arrived(self, request: Request) -> int:
        self._open_ids(request).add(request.id)
        return self._account(request).arrived(request)

    def dropped(self, request: Request) -> None:
        self._account(request).dropped(request)
        self._gone(request)

    def passed_over(self, request: Request) -> None:
        self._account(request).passed_over(request)

    def admitted(self, request: Request) -> None:
        self._open_ids(request).add(request.id)
        self._turns.admitted(request, counts=True)
        self._account(request).admitted(request)

    def left(self, request: Request) -> None:
        self._account(request).left(request)
        self._gone(request)

    def _open_ids(self, request: Request) -> set[int]:
        return self._open.setdefault(self._priority.rank(request), set())

    def _account(self, request: Request) -> RequestFollower:
        follower = self.policy_of(self._priority.rank(request)).follower
        assert follower is not None
        return follower

    def _gone(self, request: Request) -> None:
        """Forget a class without requests. When it is used again, its accounts begin at 0."""
        ids = self._open_ids(request)
        ids.discard(request.id)
        if not ids:
            rank = self._priority.rank(request)
            del self._open[rank]
            self._policies.pop(rank, None)

    def policy_of(self, rank: int) -> Policy:
        """The policy inside a class."""
        if not self._keeps_account:
            return self._plain
        if rank not in self._policies:
            made = self._inside.make(self.context)
            if self.prefix_index is not None:
                made.use_index(self.prefix_index, self.subtree_counts)
            self._policies[rank] = made
        return self._policies[rank]

    def displaced(
        self,
        table: WaitingTable,
        indices: LongArray,
        newcomer: Request,
    ) -> Iterator[Request]:
        """Requests of lower classes, the latest of the lowest class first; then those of the
        newcomer's class that its policy displaces."""
        yield from self._priority.displaced(table, indices, newcomer)
        own_rank = self._priority.rank(newcomer)
        inside = self.policy_of(own_rank).displacement
        if inside is None:
            return
        ranks = self._priority.key(table, indices, newcomer.spec.arrival_s)
        yield from inside.displaced(table, indices[ranks == own_rank], newcomer)

    # The order

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        lanes = self._lanes
        if lanes is not None:
            self.look(table)
            return self._by_class(table, lanes, end, now)
        walk = ClassWalk(self, table, end, now)
        aging_s = self.context.settings.aging_s
        if self.ages or not aging_s:
            return walk.by_class()
        oldest = next(table.came_by(now - aging_s, end), None)
        if oldest is None:
            self._turns.forget_turns()
            return walk.by_class()
        return self._turns.interleave(walk.of_oldest(now - aging_s), walk.by_class())

    def look(self, table: WaitingTable) -> None:
        if self._lanes is not None:
            self._lanes.update(table)
            if self._plain.stable_keys() is None:
                self._by_age.update(table)
        for policy in self._policies.values():
            policy.look(table)

    def _rank_of(self, table: WaitingTable, indices: LongArray) -> LongArray:
        return self._priority.key(table, indices, 0.0)

    def _by_class(
        self, table: WaitingTable, lanes: Lanes, end: int, now: float
    ) -> Iterator[Request]:
        for rank in sorted(lanes.lanes):
            as_they_came = requests_of(table, self._by_age.lane(rank), end)
            yield from self._plain.order_lane(table, lanes.lane(rank), as_they_came, end, now)

    def rising_ranks(self, table: WaitingTable, end: int) -> Iterator[int]:
        """The classes of the requests before the arrival `end`, lowest first; perhaps also
        others."""
        if self._keeps_account:
            yield from sorted(self._open)
            return
        ranks = self._priority.key(table, table.indices_before(end), 0.0)
        for _ in range(MAX_SCANS):
            if not len(ranks):
                return
            lowest = int(ranks.min())
            yield lowest
            ranks = ranks[ranks > lowest]
        yield from np.unique(ranks).tolist()

    def order_of(self, rank: int, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        """The order of one class."""
        policy = self.policy_of(rank)
        if policy.yields_followed_only:
            return policy.order_waiting(table, end, now)
        indices = table.indices_before(end)
        ranks = self._priority.key(table, indices, now)
        return policy.order(table, chosen(indices, ranks == rank), now)

    def rank(self, request: Request) -> int:
        return self._priority.rank(request)


class ClassWalk:
    """The requests whose arrival order is below `end`. Both iterators draw from the same orders, so
    each request is named once."""

    def __init__(
        self,
        classes: Classes,
        table: WaitingTable,
        end: int,
        now: float,
    ) -> None:
        self._classes = classes
        self._table = table
        self._end = end
        self._now = now
        self._named: set[int] = set()  # arrival orders
        self._orders: dict[int, Iterator[Request]] = {}

    def by_class(self) -> Iterator[Request]:
        """Requests of the lowest rank first."""
        for rank in self._classes.rising_ranks(self._table, self._end):
            yield from self._order(rank)

    def of_oldest(self, time_s: float) -> Iterator[Request]:
        """Repeatedly the next request of the class whose overdue request is the oldest.

        A request that arrived at `time_s` or earlier is overdue.
        """
        for oldest in self._table.came_by(time_s, self._end):
            while oldest.spec.arrival_order not in self._named:
                request = next(self._order(self._classes.rank(oldest)), None)
                if request is None:
                    break
                yield request

    def _order(self, rank: int) -> Iterator[Request]:
        """The remaining requests of a class, in its order."""
        order = self._orders.get(rank)
        if order is None:
            order = self._begin(rank)
            self._orders[rank] = order
        return order

    def _begin(self, rank: int) -> Iterator[Request]:
        for request in self._classes.order_of(rank, self._table, self._end, self._now):
            self._named.add(request.spec.arrival_order)
            yield request

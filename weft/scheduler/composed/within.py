"""The order within a tenant by any policy: what `fair(key) > X` puts into `Fair`.

Between tenants the accounts alone decide, so no cached prefix puts one ahead. Knows nothing of how
service is counted (`policies/fair.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import BoolArray, LongArray
from weft.scheduler.policies.fair import TenantTurn, wants_oldest_of
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, SOME, DoubleArray, WaitingTable, chosen


class OrderWithin:
    """Makes the walks of a `Fair` over the requests of its tenants."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def walk(
        self,
        table: WaitingTable,
        indices: LongArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        overdue_end: int,
        now: float,
    ) -> WalkWithin:
        return WalkWithin(
            self.policy,
            table,
            indices,
            service=service,
            since_oldest=since_oldest,
            overdue_end=overdue_end,
            now=now,
        )


class WalkWithin:
    """Which request is next among those at `indices` [n]: that of the tenant with least service
    which its policy names, or its oldest.

    A tenant's requests are put in order when it first has a turn, and only as far as they are
    asked for.
    """

    def __init__(
        self,
        policy: Policy,
        table: WaitingTable,
        indices: LongArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        overdue_end: int,
        now: float,
    ) -> None:
        num = len(indices)
        self.service = service
        self.since_oldest = since_oldest
        self._policy = policy
        self._table = table
        self._indices = indices
        self._now = now
        self._overdue_end = overdue_end
        self._tenants: LongArray = table.tag.take(indices)  # [n]
        self._is_left: BoolArray = np.ones(num, dtype=np.bool_)
        self._oldest = self._first_of_each()
        self._orders: dict[int, Iterator[Request]] = {}  # by tenant

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        """The arrival of the next request. The turn never leaves the tenant whose it is."""
        is_left = self._oldest < EVERYBODY
        served = np.where(is_left, self.service, np.inf)
        least = served.min()
        if least == np.inf:
            return None
        ties = np.flatnonzero(served == least)
        # Of equally served tenants, the one whose request came first.
        due = int(ties[np.argmin(self._oldest[ties])])
        wants_oldest = wants_oldest_of(self.since_oldest, self._oldest, self._overdue_end)
        is_oldest = bool(wants_oldest[due])
        arrival = int(self._oldest[due]) if is_oldest else self._best_of(due)
        return arrival, TenantTurn(is_due=True, is_oldest=is_oldest)

    def _best_of(self, tenant: int) -> int:
        """The arrival of the tenant's next request in the order of the policy."""
        order = self._orders.get(tenant)
        if order is None:
            own = chosen(self._indices, self._tenants == tenant)
            order = self._policy.order(self._table, own, self._now)
            self._orders[tenant] = order
        for request in order:
            if self._is_left[self._place_of(request.spec.arrival_order)]:
                return request.spec.arrival_order
        # The policy has named too few: as they came.
        return int(self._oldest[tenant])

    def take(self, arrival: int) -> int:
        """This request is not left any more. Returns its tenant."""
        place = self._place_of(arrival)
        tenant = int(self._tenants[place])
        self._is_left[place] = False
        if self._oldest[tenant] == arrival:
            self._oldest[tenant] = self._next_of(tenant, place)
        return tenant

    def _place_of(self, arrival: int) -> int:
        """The place [n] of a request."""
        index = self._table.index_by_arrival(arrival)
        return int(np.searchsorted(self._indices, index))

    def _first_of_each(self) -> LongArray:
        """By tenant, the arrival of its first request; EVERYBODY: it has none."""
        first: LongArray = np.full(len(self.service), EVERYBODY)
        # The last that is written stays.
        first[self._tenants[::-1]] = self._table.arrival_order.take(self._indices[::-1])
        return first

    def _next_of(self, tenant: int, place: int) -> int:
        """The arrival of the tenant's first request behind this place that is left."""
        for first in range(place + 1, len(self._tenants), SOME):
            is_theirs = self._tenants[first : first + SOME] == tenant
            is_next = is_theirs & self._is_left[first : first + SOME]
            if is_next.any():
                index = self._indices[first + int(np.argmax(is_next))]
                return int(self._table.arrival_order[index])
        return EVERYBODY

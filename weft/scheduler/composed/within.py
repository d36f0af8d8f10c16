"""The order within a tenant by any policy: what `fair(key) > X` puts into `Fair`.

Between tenants the accounts alone decide, so no cached prefix puts one ahead. Knows nothing of how
service is counted (`policies/fair.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.scheduler.policies.fair import TenantTurn, wants_oldest_of
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class OrderWithin:
    """Makes the walks of a `Fair` over the requests of its tenants."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def walk(
        self,
        table: WaitingTable,
        indices: IntArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
        now: float,
    ) -> WalkWithin:
        return WalkWithin(
            self.policy,
            table,
            indices,
            service=service,
            since_oldest=since_oldest,
            num_overdue=num_overdue,
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
        indices: IntArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
        now: float,
    ) -> None:
        num = len(indices)
        self.service = service
        self.since_oldest = since_oldest
        self.cost: LongArray = table.fill_len[indices] - table.cached_len[indices]
        self._policy = policy
        self._table = table
        self._indices = indices
        self._now = now
        self._num_overdue = num_overdue
        self._tenants: LongArray = table.tag[indices]  # [n]
        self._is_left: BoolArray = np.ones(num, dtype=np.bool_)
        # By tenant, its first position that is left; n: none is. Of several assignments to one
        # tenant the last one stays, so they are made from the last position to the first.
        self._oldest: LongArray = np.full(len(service), num)
        self._oldest[self._tenants[::-1]] = np.arange(num)[::-1]
        self._orders: dict[int, Iterator[Request]] = {}  # by tenant

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn]:
        """The position of the next request. The turn never leaves the tenant whose it is."""
        is_left = self._oldest < len(self._tenants)
        served = np.where(is_left, self.service, np.inf)
        ties = np.flatnonzero(served == served.min())
        # Of equally served tenants, the one whose request came first.
        first_of_ties = np.argmin(self._oldest[ties])
        due = int(ties[first_of_ties])
        wants_oldest = wants_oldest_of(self.since_oldest, self._oldest, self._num_overdue)
        is_oldest = bool(wants_oldest[due])
        if is_oldest:
            position = int(self._oldest[due])
        else:
            position = self._best_of(due)
        return position, TenantTurn(is_due=True, is_oldest=is_oldest)

    def _best_of(self, tenant: int) -> int:
        """The position of the tenant's next request in the order of the policy."""
        order = self._orders.get(tenant)
        if order is None:
            own = self._indices[self._tenants == tenant]
            order = self._policy.order(self._table, own, self._now)
            self._orders[tenant] = order
        for request in order:
            index = self._table.index_of(request)
            position = int(np.searchsorted(self._indices, index))
            if self._is_left[position]:
                return position
        # The policy has named too few: as they came.
        return int(self._oldest[tenant])

    def take(self, position: int) -> int:
        """The request at this position is not left any more. Returns its tenant."""
        tenant = int(self._tenants[position])
        self._is_left[position] = False
        if self._oldest[tenant] != position:
            return tenant
        is_theirs = self._tenants[position:] == tenant
        is_next = is_theirs & self._is_left[position:]
        if is_next.any():
            self._oldest[tenant] = position + int(np.argmax(is_next))
        else:
            self._oldest[tenant] = len(self._tenants)
        return tenant

"""The order within a tenant by any policy: what `fair(key) > X` puts into `Fair`.

Between tenants the accounts alone decide, so no cached prefix puts one ahead. Knows nothing of how
service is counted (`policies/fair.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.arrays import BoolArray, LongArray
from weft.scheduler.policies.fair import (
    TenantTurn,
    cost_of,
    first_positions,
    next_position,
    wants_oldest_of,
)
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable, chosen


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
        indices: LongArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
        now: float,
    ) -> None:
        num = len(indices)
        self.service = service
        self.since_oldest = since_oldest
        self._policy = policy
        self._table = table
        self._indices = indices
        self._now = now
        self._num_overdue = num_overdue
        self._tenants: LongArray = table.tag.take(indices)  # [n]
        self._is_left: BoolArray = np.ones(num, dtype=np.bool_)
        self._oldest = first_positions(self._tenants, len(service))
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
            own = chosen(self._indices, self._tenants == tenant)
            order = self._policy.order(self._table, own, self._now)
            self._orders[tenant] = order
        for request in order:
            index = self._table.index_of(request)
            position = int(np.searchsorted(self._indices, index))
            if self._is_left[position]:
                return position
        # The policy has named too few: as they came.
        return int(self._oldest[tenant])

    def cost(self, position: int) -> int:
        """Tokens to compute of the request at this position."""
        return cost_of(self._table, int(self._indices[position]))

    def take(self, position: int) -> int:
        """The request at this position is not left any more. Returns its tenant."""
        tenant = int(self._tenants[position])
        self._is_left[position] = False
        if self._oldest[tenant] == position:
            self._oldest[tenant] = next_position(position, self._tenants, self._is_left, tenant)
        return tenant

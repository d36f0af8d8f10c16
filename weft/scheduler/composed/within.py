"""The order within a tenant by any policy: what `fair(key) > X` puts into `Fair`.

Between tenants the accounts alone decide, so no cached prefix puts one ahead. Knows nothing of how
service is counted (`policies/fair.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from weft.arrays import LongArray
from weft.scheduler.lanes.lanes import Lanes
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable, chosen


class OrderWithin:
    """A policy within the tenants of a `Fair`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def orders(self, table: WaitingTable, indices: LongArray, now: float) -> TenantOrders:
        own = OwnRequests(self.policy, table, indices, now)
        return TenantOrders(own.order)

    def orders_of_lanes(
        self, table: WaitingTable, in_order: Lanes, by_age: Lanes, end: int, now: float
    ) -> TenantOrders:
        def order(tenant: int) -> Iterator[Request]:
            lane = in_order.lane(tenant)
            return self.policy.order_lane(table, lane, by_age.lane(tenant), end, now)

        return TenantOrders(order)


class TenantOrders:
    """The orders of all tenants, at one moment.

    A tenant's requests are put in order when it first has a turn, and only as far as they are
    asked for.
    """

    def __init__(self, order_of: Callable[[int], Iterator[Request]]) -> None:
        self._order_of = order_of
        self._orders: dict[int, Iterator[Request]] = {}  # by tenant

    def next_of(self, tenant: int, taken: Set[int]) -> int | None:
        """The arrival of the tenant's next request that is not `taken`; None: none is named."""
        order = self._orders.get(tenant)
        if order is None:
            order = self._order_of(tenant)
            self._orders[tenant] = order
        for request in order:
            if request.spec.arrival_order not in taken:
                return request.spec.arrival_order
        return None


class OwnRequests:
    """The requests of each tenant among those at `indices` [n], for a policy without lanes."""

    def __init__(
        self,
        policy: Policy,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> None:
        self._policy = policy
        self._table = table
        self._indices = indices
        self._now = now
        self._tenants: LongArray = table.tag.take(indices)  # [n]

    def order(self, tenant: int) -> Iterator[Request]:
        own = chosen(self._indices, self._tenants == tenant)
        return self._policy.order(self._table, own, self._now)

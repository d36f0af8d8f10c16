"""The waiting requests of each tenant in lanes, and the rest of them while an order takes one
request after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.policies.lanes.lane import Entry
from weft.scheduler.policies.lanes.lanes import Lanes, StableKey
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray, WaitingTable

NO_ENTRY: Entry = (math.inf, EVERYBODY)  # for a tenant without requests


class TenantLanes:
    """The waiting requests of each tenant: in order of arrival, and in the order within the tenant.
    Arrays are by tenant, with EVERYBODY for a tenant without requests."""

    def __init__(self, keys: Sequence[StableKey] | None, members: Set[int]) -> None:
        """`members` are the arrival orders of the requests that wait under the policy. Without
        keys, there are only lanes by arrival."""
        self.by_age = Lanes((), self._tenants, members)
        self.in_order = None if keys is None else Lanes(keys, self._tenants, members)
        self.oldest: LongArray = np.zeros(0, dtype=np.int64)  # arrival order of the oldest request
        # arrival order of the first request in the order
        self.best: LongArray = np.zeros(0, dtype=np.int64)
        self.best_key: DoubleArray = np.zeros(0, dtype=np.float64)  # first key of that request

    def update(self, table: WaitingTable, num_tenants: int) -> None:
        num_new = num_tenants - len(self.oldest)
        if num_new:
            nobody: LongArray = np.full(num_new, EVERYBODY)
            self.oldest = np.concatenate((self.oldest, nobody))
            self.best = np.concatenate((self.best, nobody))
            self.best_key = np.concatenate((self.best_key, np.full(num_new, np.inf)))
        for tenant in self.by_age.update(table):
            first = self.by_age.lane(tenant).first() or NO_ENTRY
            self.oldest[tenant] = first[-1]
        if self.in_order is None:
            return
        for tenant in self.in_order.update(table):
            first = self.in_order.lane(tenant).first() or NO_ENTRY
            self.best[tenant] = first[-1]
            self.best_key[tenant] = first[0]

    def _tenants(self, table: WaitingTable, indices: LongArray) -> LongArray:
        return table.tag.take(indices)


class TenantsLeft:
    """The remaining requests of each tenant: those whose arrival order is below `end`.

    Arrays are by tenant:

        tenant        1   2   3            4 and 5 of tenant 1 wait, 6 of tenant 2, none of tenant
        3;
        oldest        4   6   -            5 has a longer cached prefix than 4
        best          5   6   -
        best_key    -64   0 inf
    """

    def __init__(
        self,
        table: WaitingTable,
        lanes: TenantLanes,
        *,
        end: int = EVERYBODY,
        order_of: Callable[[int], Iterator[Request]] | None = None,
    ) -> None:
        """`order_of` makes the order of a tenant, when its first request is needed; None: the order
        of the lanes."""
        self.oldest = lanes.oldest.copy()
        self.best = lanes.best.copy()
        self.best_key = lanes.best_key.copy()
        self._table = table
        self._lanes = lanes
        self._end = end
        self._order_of = order_of
        self.taken: set[int] = set()  # arrival orders
        # Of tenants with taken requests: the rest of their lanes, or of their orders.
        self._by_age: dict[int, Iterator[Entry]] = {}
        self._in_order: dict[int, Iterator[Entry]] = {}
        self._orders: dict[int, Iterator[Request]] = {}
        if end != EVERYBODY:
            self._leave_out_later_ones()

    def next_of(self, tenant: int, best: int, oldest: int) -> int:
        """The arrival order of the next request of a tenant: `best` if the lanes have the order;
        `oldest` if the order of `order_of` has no more requests."""
        if self._order_of is None:
            return best
        order = self._orders.get(tenant)
        if order is None:
            order = self._order_of(tenant)
            self._orders[tenant] = order
        for request in order:
            if request.spec.arrival_order not in self.taken:
                return request.spec.arrival_order
        return oldest

    def take(self, tenant: int, arrival: int) -> None:
        """Remove this request of a tenant."""
        self.taken.add(arrival)
        if self.oldest[tenant] == arrival:
            self.oldest[tenant] = next(self.rest_by_age(tenant), NO_ENTRY)[-1]
        if self.best[tenant] == arrival:
            self._go_on(tenant)

    def key_of(self, arrival: int) -> float:
        """The key of the longest cached prefix for a request."""
        return -float(self._table.cached_len[self._table.index_by_arrival(arrival)])

    def rest_by_age(self, tenant: int) -> Iterator[Entry]:
        """The remaining entries of a tenant in order of arrival, each yielded once."""
        if tenant not in self._by_age:
            self._by_age[tenant] = filter(self._is_left, self._lanes.by_age.of(tenant))
        return self._by_age[tenant]

    def rest_in_order(self, tenant: int) -> Iterator[Entry]:
        """The same in the order of the lane."""
        in_order = self._lanes.in_order
        assert in_order is not None
        if tenant not in self._in_order:
            self._in_order[tenant] = filter(self._is_left, in_order.of(tenant))
        return self._in_order[tenant]

    def _is_left(self, entry: Entry) -> bool:
        return entry[-1] < self._end and entry[-1] not in self.taken

    def _go_on(self, tenant: int) -> None:
        """Set the next request of a tenant to the best remaining one."""
        following = next(self.rest_in_order(tenant), NO_ENTRY)
        self.best[tenant] = following[-1]
        self.best_key[tenant] = following[0]

    def _leave_out_later_ones(self) -> None:
        self.oldest[self.oldest >= self._end] = EVERYBODY
        for tenant in np.flatnonzero((self.best >= self._end) & (self.best < EVERYBODY)).tolist():
            self._go_on(tenant)

"""Fair shares for tenants: the tenant with the least service, divided by its weight, goes first.

Each tenant has a counter of the service that it has received: computed tokens of its prompts, and
generated tokens, which cost more, divided by its weight. Source: VTC, arXiv:2401.00588. The counter
of a tenant that begins to wait is raised to the least counter of the waiting tenants, so that idle
time saves up no service. Among the tenants that are at most `QUANTUM` ahead of the least served
one, the longest cached prefix goes first. So the cache can cause at most that much unfairness, and
every fourth turn always belongs to the least served tenant. Source: D2LPM, arXiv:2501.14312.

**Bound.** Two tenants that both have a ready request waiting all the time receive, in any span of
time, service per weight that differs by at most 2 U, with

    U = QUANTUM + the larger of the two tenants' (L + DECODE_COST * G) / weight

where L is the longest prompt in tokens, and G the number of tokens that the running requests of one
tenant may still generate: at most `max_running_requests` times the longest output, and at most the
KV pool while no request is retracted. The reason: a tenant is admitted only while its counter is at
most QUANTUM above the least, and until its next admission only its running requests add to the
counter. (VTC has max(L, DECODE_COST * M) for U: no QUANTUM, and a pool of M tokens that has room
for all that the running requests will ever need.) Only resumed requests go before this order, and
they are not charged again; the age of a request counts only among the requests of its tenant.

If another policy orders the requests within tenants (`fair(key) > X`), each turn belongs to the
least served tenant: QUANTUM is then 0 in the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from weft.arrays import IntArray, LongArray
from weft.memory.index.prefix_index import PrefixIndex
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policies.kinds.lpm import LongestPrefix
from weft.scheduler.policies.lanes.lanes import requests_of
from weft.scheduler.policies.protocol import TURNS, Policy, PolicyContext
from weft.scheduler.policies.tenants.accounts import Tenants
from weft.scheduler.policies.tenants.left import TenantLanes, TenantsLeft
from weft.scheduler.policies.tenants.long_walk import LongWalk
from weft.scheduler.policies.tenants.walk import NextTenant, TenantTurn, Walk
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable, chosen

DECODE_COST = 2.0  # of a generated token, in prompt tokens
NO_TENANT = 0
FEW_NAMED = 8  # up to this many requests, scanning all tenants is faster than heaps


class Fair(Policy):
    ages = False  # this policy ages requests itself, within each tenant
    ages_within = True

    def __init__(self, context: PolicyContext, within: Policy | None = None) -> None:
        """`within` orders each tenant; None: longest cached prefix, to a small extent across
        tenants."""
        super().__init__(context)
        self._within = within
        self.reads_cache = within is None or within.reads_cache
        self.displacement = self
        self.follower = self
        num_rows = len(context.columns.seq_len)
        shares = context.settings.tenant_shares
        self._tenants = Tenants(shares)
        # arrival orders of requests that have not run under this policy
        self._waiting: set[int] = set()
        # Whether the order within tenants needs more than that of a lane.
        self._asks_within = within is not None and within.stable_keys() is None
        keys = (LongestPrefix(context),) if within is None else within.lane_keys()
        self._lanes = TenantLanes(keys, self._waiting)
        self.yields_followed_only = keys is not None
        self._floor = 0.0  # the least counter of waiting tenants when it was last computed
        self._since_due = 0  # admissions since the last one of the least served tenant
        # The reason for which the last order named each request, by its arrival order.
        self._turns: dict[int, TenantTurn] = {}
        self._passed_over: Request | None = None  # the last named request, if it cannot be admitted
        # By row: the tenant.
        self._tenant_of: LongArray = np.zeros(num_rows, dtype=np.int64)
        # By row: length of the sequence when its request got the row.
        self._first_len: LongArray = np.zeros(num_rows, dtype=np.int64)

    # Events of a request

    def arrived(self, request: Request) -> int:
        tenants = self._tenants
        tenant = self._number(request.message.tenant)
        arrival_order = request.spec.arrival_order
        if not tenants.num_waiting[tenant]:
            # The tenant begins to wait, so its counter is raised to the least: no saved-up service.
            served = self._served()
            shortfall = self._least() - served[tenant]
            tenants.service[tenant] += max(shortfall, 0.0)
        # These two statements belong together: `dropped` undoes both, or neither.
        tenants.num_waiting[tenant] += 1
        self._waiting.add(arrival_order)
        return tenant

    def dropped(self, request: Request) -> None:
        arrival_order = request.spec.arrival_order
        if arrival_order not in self._waiting:
            return
        self._waiting.remove(arrival_order)
        tenant = self._tenants.number_of(request.message.tenant)
        assert tenant is not None
        self._tenants.num_waiting[tenant] -= 1

    def passed_over(self, request: Request) -> None:
        self._passed_over = request

    def admitted(self, request: Request) -> None:
        row = request.row
        tenant = self._number(request.message.tenant)
        arrival_order = request.spec.arrival_order
        # A retracted request is not charged again: computing its tokens again is no service.
        if arrival_order in self._waiting:
            self._waiting.remove(arrival_order)
            self._charge_admission(request, tenant)
        self._tenants.num_rows[tenant] += 1
        self._tenant_of[row] = tenant
        self._first_len[row] = request.fill_len

    def _charge_admission(self, request: Request, tenant: int) -> None:
        tenants = self._tenants
        tenants.num_waiting[tenant] -= 1
        num_computed = request.fill_len - request.prefix.length
        weight = tenants.weight[tenant]
        tenants.service[tenant] += num_computed / weight
        turn = self._turns.get(request.spec.arrival_order, NO_TURN)
        if turn.is_due:
            self._since_due = 0
        else:
            self._since_due += 1
        if turn.is_oldest:
            tenants.since_oldest[tenant] = 0
        else:
            tenants.since_oldest[tenant] += 1

    def left(self, request: Request) -> None:
        row = request.row
        tenant = int(self._tenant_of[row])
        if tenant == NO_TENANT:
            return
        # One row as an array, because `_unpaid` sums over rows.
        rows: IntArray = np.array([row], dtype=np.int32)
        self._tenants.service += self._unpaid(rows)
        self._tenant_of[row] = NO_TENANT
        self._tenants.num_rows[tenant] -= 1

    def displaced(
        self,
        table: WaitingTable,
        indices: LongArray,
        newcomer: Request,
    ) -> Iterator[Request]:
        """The latest requests of the tenant with the most waiting requests per weight, as long as
        it has more than the newcomer's tenant."""
        # a copy: entries of displaced requests become NO_TENANT
        tenants: LongArray = table.tag[indices]
        own = self._number(newcomer.message.tenant)
        num_left = np.bincount(tenants, minlength=len(self._tenants))
        while True:
            load = num_left / self._tenants.weight
            most = int(np.argmax(load))
            if load[most] <= load[own]:
                return
            # The last match: argmax finds the first one of the reversed array.
            is_theirs = tenants == most
            from_end = int(np.argmax(is_theirs[::-1]))
            last = len(indices) - 1 - from_end
            index = int(indices[last])
            yield table.request_at(index)
            tenants[last] = NO_TENANT
            num_left[most] -= 1

    # The order

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        """The requests at `indices` [n], which must be all known requests up to some arrival."""
        end = 0
        if len(indices):
            end = int(table.arrival_order[indices[-1]]) + 1
        within = self._within
        if within is None:
            return self._walk(table, end, now, None)
        tenants: LongArray = table.tag.take(indices)

        def order_of(tenant: int) -> Iterator[Request]:
            return within.order(table, chosen(indices, tenants == tenant), now)

        return self._walk(table, end, now, order_of)

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        if not self.yields_followed_only:
            return super().order_waiting(table, end, now)
        within = self._within
        if within is None or not self._asks_within:
            return self._walk(table, end, now, None)
        lanes = self._lanes
        in_order = lanes.in_order
        assert in_order is not None

        def order_of(tenant: int) -> Iterator[Request]:
            as_they_came = requests_of(table, lanes.by_age.lane(tenant), end)
            return within.order_lane(table, in_order.lane(tenant), as_they_came, end, now)

        return self._walk(table, end, now, order_of)

    def _walk(
        self,
        table: WaitingTable,
        end: int,
        now: float,
        order_of: Callable[[int], Iterator[Request]] | None,
    ) -> Iterator[Request]:
        self.look(table)
        walk = Walk(
            TenantsLeft(table, self._lanes, end=end, order_of=order_of),
            service=self._served(),
            since_oldest=self._tenants.since_oldest.copy(),
            overdue_end=self._overdue_end(table, now),
            may_leave_due=self._within is None,
        )
        return self._named(table, walk)

    def look(self, table: WaitingTable) -> None:
        self._lanes.update(table, len(self._tenants))

    def _named(self, table: WaitingTable, begun: Walk) -> Iterator[Request]:
        """Name requests as if each were admitted at once, unless `passed_over` is called for it."""
        self._turns = {}
        # The walk has copies of the counters, because a named request may not be admitted.
        weight = self._tenants.weight
        since_due = self._since_due
        walk: NextTenant = begun
        for num_named in count():
            if num_named == FEW_NAMED:
                walk = LongWalk(begun)
            found = walk.next(may_leave_due=since_due < TURNS - 1)
            if found is None:
                return
            arrival, turn = found
            index = table.index_by_arrival(arrival)
            request = table.request_at(index)
            self._turns[arrival] = turn
            self._passed_over = None
            yield request
            if self._passed_over is request:
                walk.take(arrival, turn, None)
                continue
            walk.take(arrival, turn, cost_of(table, index) / weight[turn.tenant])
            if turn.is_due:
                since_due = 0
            else:
                since_due += 1

    def use_index(
        self,
        index: PrefixIndex,
        counts: SubtreeCounts | None,
    ) -> None:
        super().use_index(index, counts)
        if self._within is not None:
            self._within.use_index(index, counts)

    def new_counts(self) -> SubtreeCounts | None:
        return None if self._within is None else self._within.new_counts()

    def _overdue_end(self, table: WaitingTable, now: float) -> int:
        """An arrival order above those of all overdue requests."""
        aging_s = self.context.settings.aging_s
        if not aging_s:
            return 0
        return table.end_by(now - aging_s)

    # Service

    def _number(self, name: str) -> int:
        """The number of a tenant. A new tenant begins with the least counter of waiting tenants."""
        tenant = self._tenants.number_of(name)
        if tenant is None:
            return self._tenants.add(name, self._least())
        return tenant

    def _least(self) -> float:
        """The least counter of tenants with waiting requests; it never falls.

        If no tenant waits, it is the highest counter: all tenants are equal again.
        """
        served = self._served()
        waits = self._tenants.num_waiting > 0
        if waits.any():
            least = float(served[waits].min())
        else:
            least = float(served.max())
        self._floor = max(self._floor, least)
        return self._floor

    def _served(self) -> DoubleArray:
        """By tenant, the service per weight that it has received."""
        rows = self.context.running.rows
        served: DoubleArray = self._tenants.service + self._unpaid(rows)
        return served

    def _unpaid(self, rows: IntArray) -> DoubleArray:
        """By tenant, the service for the tokens that its requests in `rows` have generated.

        It is added to the counter when a request leaves its row, so that steps need no update.
        """
        known_len = self.context.columns.known_len.take(rows)
        generated = known_len - self._first_len.take(rows)
        tenants = self._tenant_of.take(rows)
        weight = self._tenants.weight.take(tenants)
        cost = generated * DECODE_COST / weight
        has_tenant = tenants != NO_TENANT
        cost = np.where(has_tenant, cost, 0.0)
        sums = np.bincount(
            tenants,
            weights=cost,
            minlength=len(self._tenants),
        )
        return sums.astype(np.float64, copy=False)


NO_TURN = TenantTurn(NO_TENANT, is_due=False, is_oldest=False)


def cost_of(table: WaitingTable, index: int) -> int:
    """Number of tokens of a request to compute."""
    return int(table.fill_len[index] - table.cached_len[index])


POLICY = Fair

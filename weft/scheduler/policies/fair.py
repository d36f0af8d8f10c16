"""Fair shares for tenants: the tenant that was served least goes first, weighted.

Each tenant has a counter of the service that it has received: tokens computed of its prompts, and
tokens generated, which cost more, divided by its weight. Source: VTC, arXiv:2401.00588. A tenant
that begins to wait begins at the least counter of those that wait already: it saves up nothing
while it wants nothing. Among the tenants that are at most `QUANTUM` ahead of the least served one,
the longest cached prefix goes first: the cache may buy that much unfairness, and no more, and one
of four turns always belongs to the least served. Source: D2LPM, arXiv:2501.14312.

**Bound.** Two tenants that both have a ready request waiting all the while receive, in any span of
time, service per weight that differs by at most 2 U, with

    U = QUANTUM + the larger of the two tenants' (L + DECODE_COST * G) / weight

where L is the longest prompt in tokens, and G the tokens that the running requests of one tenant
may still generate: at most `max_running_requests` times the longest output, and at most the KV pool
while none is retracted. For a tenant is admitted only while its counter is at most QUANTUM above
the least, and until its next admission only its running requests add to the counter.
(VTC has max(L, DECODE_COST * M) for U: no QUANTUM, and a pool of M tokens that has room for all
that the running requests will ever need.) Only requests that resume go before this order, and they
are not charged again; the age of a request counts only among the requests of its tenant.

With an order of one's own within the tenants (`fair(key) > X`), each turn belongs to the least
served: QUANTUM is then 0 in the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.lanes.lane import Entry
from weft.scheduler.lanes.lanes import Lanes, LastingKey
from weft.scheduler.policies.lpm import LongestPrefix
from weft.scheduler.policy import TURNS, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray, WaitingTable

DECODE_COST = 2.0  # of a generated token, in tokens of a prompt
QUANTUM = 4_096.0  # service by which a tenant may be ahead and still go first for its cached prefix
NO_TENANT = 0
NO_ENTRY: Entry = (math.inf, EVERYBODY)  # of a tenant who has none


class Tenants:
    """The accounts of the tenants, by number from 1 on.

    A tenant that waits for nothing, and is not ahead of the others, is forgotten, and another
    tenant gets its number.
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self._shares = shares
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        # By number; the arrays double together.
        self.service: DoubleArray = np.zeros(1, dtype=np.float64)  # paid so far, by weight
        self.weight: DoubleArray = np.ones(1, dtype=np.float64)
        self.num_waiting: LongArray = np.zeros(1, dtype=np.int64)  # requests that never ran
        self.num_rows: LongArray = np.zeros(1, dtype=np.int64)  # that its requests have
        # Admissions since the last that was overdue and the oldest.
        self.since_oldest: LongArray = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        """Numbers in use or free."""
        return len(self.service)

    def number_of(self, name: str) -> int | None:
        return self._numbers.get(name)

    def add(self, name: str, service: float) -> int:
        """Open an account that begins with some service. Returns its number."""
        if not self._free:
            self._forget_idle(service)
        if not self._free:
            self._double()
        tenant = self._free.pop()
        self._numbers[name] = tenant
        self.service[tenant] = service
        self.weight[tenant] = self._shares.get(name, 1.0)
        self.num_waiting[tenant] = 0
        self.num_rows[tenant] = 0
        self.since_oldest[tenant] = 0
        return tenant

    def _forget_idle(self, least: float) -> None:
        """Forget tenants without requests that would be lifted anyway when they come back."""
        has_nothing = self.num_waiting + self.num_rows == 0
        is_idle = has_nothing & (self.service <= least)
        accounts = list(self._numbers.items())
        for name, tenant in accounts:
            if is_idle[tenant]:
                del self._numbers[name]
                self._free.append(tenant)

    def _double(self) -> None:
        size = len(self.service)
        no_service = np.zeros(size)
        unit_weight = np.ones(size)
        no_count = np.zeros(size, dtype=np.int64)
        self.service = np.concatenate([self.service, no_service])
        self.weight = np.concatenate([self.weight, unit_weight])
        self.num_waiting = np.concatenate([self.num_waiting, no_count])
        self.num_rows = np.concatenate([self.num_rows, no_count])
        self.since_oldest = np.concatenate([self.since_oldest, no_count])
        # `add` pops from the end, so that the lowest number is used first.
        new_numbers = range(size, 2 * size)
        self._free = list(reversed(new_numbers))


class OrdersWithin(Protocol):
    """The orders of the tenants, of one moment."""

    def next_of(self, tenant: int, taken: Set[int]) -> int | None:
        """The arrival of the tenant's next request that is not `taken`; None: none is named."""
        ...


class Within(Protocol):
    """An order within the tenants."""

    policy: Policy

    def orders(self, table: WaitingTable, indices: LongArray, now: float) -> OrdersWithin:
        """Those of the requests at `indices` [n], for a policy without lanes."""
        ...

    def orders_of_lanes(
        self, table: WaitingTable, in_order: Lanes, by_age: Lanes, end: int, now: float
    ) -> OrdersWithin:
        """Those of the requests before the arrival `end`, with a lane for each tenant."""
        ...


class Fair(Policy):
    ages = False  # here, within each tenant
    ages_within = True

    def __init__(self, context: PolicyContext, within: Within | None = None) -> None:
        """`within` each tenant; None: the longest cached prefix, also a little across tenants."""
        super().__init__(context)
        self._within = within
        self.reads_cache = within is None or within.policy.reads_cache
        self.displacement = self
        self.follower = self
        num_rows = len(context.columns.seq_len)
        shares = context.settings.tenant_shares
        self._tenants = Tenants(shares)
        self._waiting: set[int] = set()  # arrivals of requests that have not run under this policy
        # Whether an order within the tenants is more than that of a lane.
        self._asks_within = within is not None and within.policy.lasting_keys() is None
        keys = (LongestPrefix(context),) if within is None else within.policy.lane_keys()
        self._lanes = TenantLanes(keys, self._waiting)
        self.names_its_own = keys is not None
        self._floor = 0.0  # the least counter of tenants that wait, as of the last look
        self._since_due = 0  # admissions since the last of the tenant whose turn it was
        # Why the last order named a request, by its arrival.
        self._turns: dict[int, TenantTurn] = {}
        self._passed_over: Request | None = None  # the last named one, if it cannot be admitted
        # By row.
        self._tenant_of: LongArray = np.zeros(num_rows, dtype=np.int64)
        # Sequence length with which its request got the row.
        self._first_len: LongArray = np.zeros(num_rows, dtype=np.int64)

    # A request comes and goes

    def arrived(self, request: Request) -> int:
        tenants = self._tenants
        tenant = self._number(request.message.tenant)
        arrival_order = request.spec.arrival_order
        if not tenants.num_waiting[tenant]:
            # It begins to wait, so it is lifted to the least: it may not have saved up service.
            served = self._served()
            behind = self._least() - served[tenant]
            tenants.service[tenant] += max(behind, 0.0)
        # These two together: `dropped` undoes both, or none.
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
        # A retracted request does not count again: to compute anew what it had is no service.
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
        """The latest of the tenant that has most waiting for its weight, while another has more
        than the newcomer's."""
        tenants: LongArray = table.tag[indices]  # a copy: those that have gone are NO_TENANT
        own = self._number(newcomer.message.tenant)
        num_left = np.bincount(tenants, minlength=len(self._tenants))
        while True:
            load = num_left / self._tenants.weight
            most = int(np.argmax(load))
            if load[most] <= load[own]:
                return
            # The last of them: argmax finds the first of the reversed ones.
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
        """The requests at `indices` [n], which are all that have been introduced and came before
        some moment."""
        end = 0
        if len(indices):
            end = int(table.arrival_order[indices[-1]]) + 1
        if self._within is None:
            return self._walk(table, end, now, None)
        self.lend_index(self._within.policy)
        return self._walk(table, end, now, self._within.orders(table, indices, now))

    def order_waiting(self, table: WaitingTable, end: int, now: float) -> Iterator[Request]:
        if not self.names_its_own:
            return super().order_waiting(table, end, now)
        if not self._asks_within:
            return self._walk(table, end, now, None)
        self.look(table)
        lanes = self._lanes
        assert self._within is not None
        assert lanes.in_order is not None
        orders = self._within.orders_of_lanes(table, lanes.in_order, lanes.by_age, end, now)
        return self._walk(table, end, now, orders)

    def _walk(
        self, table: WaitingTable, end: int, now: float, orders: OrdersWithin | None
    ) -> Iterator[Request]:
        self.look(table)
        walk = Walk(
            table,
            self._lanes,
            service=self._served(),
            since_oldest=self._tenants.since_oldest.copy(),
            overdue_end=self._overdue_end(table, now),
            end=end,
            may_leave_due=self._within is None,
            orders=orders,
        )
        return self._named(table, walk)

    def look(self, table: WaitingTable) -> None:
        self._lanes.update(table, len(self._tenants))

    def _named(self, table: WaitingTable, walk: Walk) -> Iterator[Request]:
        """As if each request that is named were admitted at once, unless it is `passed_over`."""
        self._turns = {}
        # The walk writes copies of the accounts: a request that it names may not be admitted.
        weight = self._tenants.weight
        since_due = self._since_due
        while True:
            found = walk.next(may_leave_due=since_due < TURNS - 1)
            if found is None:
                return
            arrival, turn = found
            index = table.index_by_arrival(arrival)
            request = table.request_at(index)
            self._turns[arrival] = turn
            self._passed_over = None
            yield request
            tenant = walk.take(arrival)
            if self._passed_over is request:
                continue
            walk.service[tenant] += cost_of(table, index) / weight[tenant]
            if turn.is_oldest:
                walk.since_oldest[tenant] = 0
            else:
                walk.since_oldest[tenant] += 1
            if turn.is_due:
                since_due = 0
            else:
                since_due += 1

    def new_counts(self) -> SubtreeCounts | None:
        return None if self._within is None else self._within.policy.new_counts()

    def _overdue_end(self, table: WaitingTable, now: float) -> int:
        """Whoever came before the arrival with this number is overdue."""
        aging_s = self.context.settings.aging_s
        if not aging_s:
            return 0
        return table.end_by(now - aging_s)

    # Service

    def _number(self, name: str) -> int:
        """The number of a tenant. A new one begins with the least service of those that wait."""
        tenant = self._tenants.number_of(name)
        if tenant is None:
            return self._tenants.add(name, self._least())
        return tenant

    def _least(self) -> float:
        """The least counter of tenants with waiting requests; it never falls.

        Without such tenants it is the highest counter: all are even again.
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
        """By tenant, the service that it has received per weight."""
        rows = self.context.running.rows
        served: DoubleArray = self._tenants.service + self._unpaid(rows)
        return served

    def _unpaid(self, rows: IntArray) -> DoubleArray:
        """By tenant, the service of the tokens that its requests in `rows` have generated.

        It is added to the account when a request leaves its row, so that a step pays nothing.
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


class TenantTurn(NamedTuple):
    """Why a request was named next."""

    is_due: bool  # its tenant was the least served
    is_oldest: bool  # it was overdue, and its tenant's turn for such a one had come


NO_TURN = TenantTurn(is_due=False, is_oldest=False)


def cost_of(table: WaitingTable, index: int) -> int:
    """Tokens to compute of a request."""
    return int(table.fill_len[index] - table.cached_len[index])


def wants_oldest_of(since_oldest: LongArray, oldest: LongArray, overdue_end: int) -> BoolArray:
    """By tenant, whether its next turn is for its oldest request, whose arrival is `oldest`
    [tenants]; those before `overdue_end` are overdue."""
    is_overdue = oldest < overdue_end
    is_turn_of_oldest = since_oldest >= TURNS - 1
    wants: BoolArray = is_turn_of_oldest & is_overdue
    return wants


class TenantLanes:
    """The waiting requests of each tenant: as they came, and in the order within it. Arrays are by
    tenant; a tenant that has none has EVERYBODY."""

    def __init__(self, keys: Sequence[LastingKey] | None, members: Set[int]) -> None:
        """`members` are the arrivals of those that wait under the policy. Without keys, only as
        they came."""
        self.by_age = Lanes((), self._tenants, members)
        self.in_order = None if keys is None else Lanes(keys, self._tenants, members)
        self.oldest: LongArray = np.zeros(0, dtype=np.int64)  # arrival of the first that came
        self.best: LongArray = np.zeros(0, dtype=np.int64)  # of the first in the order
        self.best_key: DoubleArray = np.zeros(0, dtype=np.float64)  # its first key

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


class Walk:
    """Which request is next among those that are left: that of the tenant with least service which
    is the first in the order within it, or its oldest.

    The caller writes `service` and `since_oldest` [tenants] as it admits. With `may_leave_due` the
    key is that of the longest cached prefix, for which another tenant's may go before.

        tenant        1   2   3            4 5 of tenant 1 wait, 6 of tenant 2, nobody of tenant 3;
        oldest        4   6   -            5 has a longer cached prefix than 4
        best          5   6   -
        best_key    -64   0 inf
    """

    def __init__(
        self,
        table: WaitingTable,
        lanes: TenantLanes,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        overdue_end: int,
        end: int = EVERYBODY,
        may_leave_due: bool = True,
        orders: OrdersWithin | None = None,
    ) -> None:
        """The walk ends before the arrival with the number `end`. `orders` within the tenants;
        None: that of the lanes."""
        self.service = service
        self.since_oldest = since_oldest
        self._table = table
        self._lanes = lanes
        self._overdue_end = overdue_end
        self._end = end
        self._may_leave_due = may_leave_due
        self._orders = orders
        self._oldest = lanes.oldest.copy()
        self._best = lanes.best.copy()
        self._best_key = lanes.best_key.copy()
        self._taken: set[int] = set()
        # What is left of the lanes of tenants of whom some were taken.
        self._by_age: dict[int, Iterator[Entry]] = {}
        self._in_order: dict[int, Iterator[Entry]] = {}
        if end != EVERYBODY:
            self._leave_out_later_ones()

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        """The arrival of the next request.

        `may_leave_due`: for its cached prefix, another tenant's may go before that of the tenant
        whose turn it is.
        """
        is_left = self._oldest < EVERYBODY
        served = np.where(is_left, self.service, np.inf)
        least = served.min()
        if least == np.inf:
            return None
        wants_oldest = wants_oldest_of(self.since_oldest, self._oldest, self._overdue_end)
        # Of equally served tenants, the one whose request came first.
        ties = np.flatnonzero(served == least)
        due = int(ties[np.argmin(self._oldest[ties])])
        tenant = due
        key = float(self._best_key[due])
        if wants_oldest[due]:
            arrival = int(self._oldest[due])
            key = self._key_of(arrival)
        else:
            arrival = self._best_of(due)
        # As a rule nobody has a longer prefix, and the tenants need not be looked at.
        if self._may_leave_due and may_leave_due and key > self._best_key.min():
            may_go = served <= least + QUANTUM
            tenant, arrival = self._rival(due, arrival, key, may_go, wants_oldest)
        turn = TenantTurn(is_due=tenant == due, is_oldest=bool(wants_oldest[tenant]))
        return arrival, turn

    def take(self, arrival: int) -> int:
        """This request is not left any more. Returns its tenant."""
        tenant = int(self._table.tag[self._table.index_by_arrival(arrival)])
        self._taken.add(arrival)
        if self._oldest[tenant] == arrival:
            self._oldest[tenant] = self._following(self._by_age, self._lanes.by_age, tenant)[-1]
        if self._best[tenant] == arrival:
            self._go_on(tenant)
        return tenant

    def _best_of(self, tenant: int) -> int:
        """The arrival of the first of a tenant in the order within it."""
        if self._orders is None:
            return int(self._best[tenant])
        named = self._orders.next_of(tenant, self._taken)
        # If the policy names too few: as they came.
        return int(self._oldest[tenant]) if named is None else named

    def _rival(
        self, due: int, arrival: int, key: float, may_go: BoolArray, wants_oldest: BoolArray
    ) -> tuple[int, int]:
        """Tenant and arrival of the longest cached prefix of the tenants that may go, if it is
        longer than that of the request that is due.

        A tenant that wants its oldest offers that one alone.
        """
        tenant = due
        keys = np.where(may_go & ~wants_oldest, self._best_key, np.inf)
        longest = keys.min()
        if longest < key:
            # Of equals, the one that came first.
            ties = np.flatnonzero(keys == longest)
            tenant = int(ties[np.argmin(self._best[ties])])
            arrival = int(self._best[tenant])
            key = float(longest)
        for other in np.flatnonzero(may_go & wants_oldest).tolist():
            oldest = int(self._oldest[other])
            if self._key_of(oldest) < key:
                tenant = other
                arrival = oldest
                key = self._key_of(oldest)
        return tenant, arrival

    def _key_of(self, arrival: int) -> float:
        """The key of the longest cached prefix."""
        return -float(self._table.cached_len[self._table.index_by_arrival(arrival)])

    def _go_on(self, tenant: int) -> None:
        """The next of a tenant is the best that is left of it."""
        assert self._lanes.in_order is not None
        following = self._following(self._in_order, self._lanes.in_order, tenant)
        self._best[tenant] = following[-1]
        self._best_key[tenant] = following[0]

    def _following(self, rest: dict[int, Iterator[Entry]], lanes: Lanes, tenant: int) -> Entry:
        """The first entry of a tenant that is left."""
        entries = rest.get(tenant)
        if entries is None:
            entries = lanes.of(tenant)
            rest[tenant] = entries
        for entry in entries:
            if entry[-1] < self._end and entry[-1] not in self._taken:
                return entry
        return NO_ENTRY

    def _leave_out_later_ones(self) -> None:
        self._oldest[self._oldest >= self._end] = EVERYBODY
        for tenant in np.flatnonzero((self._best >= self._end) & (self._best < EVERYBODY)).tolist():
            self._go_on(tenant)


POLICY = Fair

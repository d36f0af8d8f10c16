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

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.index.subtree_counts import SubtreeCounts
from weft.scheduler.policy import TURNS, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import SOME, DoubleArray, WaitingTable

DECODE_COST = 2.0  # of a generated token, in tokens of a prompt
QUANTUM = 4_096.0  # service by which a tenant may be ahead and still go first for its cached prefix
NO_TENANT = 0
TAKEN = np.int64(-1)  # below every cached length: the request at this position has been named


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


class FairWalk(Protocol):
    """Names the waiting requests one by one. The caller writes `service` and `since_oldest`
    [tenants] as it admits."""

    service: DoubleArray
    since_oldest: LongArray

    def cost(self, position: int) -> int:
        """Tokens to compute of the request at this position."""
        ...

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn]:
        """The position of the next request, and why it is."""
        ...

    def take(self, position: int) -> int:
        """The request at this position is not left any more. Returns its tenant."""
        ...


class Within(Protocol):
    """An order within the tenants."""

    policy: Policy

    def walk(
        self,
        table: WaitingTable,
        indices: LongArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
        now: float,
    ) -> FairWalk:
        """A walk over the requests at `indices` [n]."""
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
        """As if each request that is named were admitted at once, unless it is `passed_over`."""
        self._turns = {}
        # The walk writes copies of the accounts: a request that it names may not be admitted.
        weight = self._tenants.weight
        walk = self._new_walk(table, indices, now)
        since_due = self._since_due
        for _ in range(len(indices)):
            may_leave_due = since_due < TURNS - 1
            position, turn = walk.next(may_leave_due=may_leave_due)
            index = int(indices[position])
            request = table.request_at(index)
            self._turns[request.spec.arrival_order] = turn
            self._passed_over = None
            yield request
            tenant = walk.take(position)
            if self._passed_over is request:
                continue
            walk.service[tenant] += walk.cost(position) / weight[tenant]
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

    def _new_walk(self, table: WaitingTable, indices: LongArray, now: float) -> FairWalk:
        service = self._served()
        since_oldest = self._tenants.since_oldest.copy()
        num_overdue = self._num_overdue(table, indices, now)
        within = self._within
        if within is None:
            return Walk(
                table,
                indices,
                service=service,
                since_oldest=since_oldest,
                num_overdue=num_overdue,
            )
        self.lend_index(within.policy)
        return within.walk(
            table,
            indices,
            service=service,
            since_oldest=since_oldest,
            num_overdue=num_overdue,
            now=now,
        )

    def _num_overdue(self, table: WaitingTable, indices: LongArray, now: float) -> int:
        """The number of overdue requests; they are the first of `indices`, which are by arrival."""
        aging_s = self.context.settings.aging_s
        if not aging_s:
            return 0
        return table.num_by(indices, now - aging_s)

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


def first_positions(tenants: LongArray, num_tenants: int) -> LongArray:
    """By tenant, its first position in `tenants` [n]; n: it has none."""
    num = len(tenants)
    first: LongArray = np.full(num_tenants, num)
    np.minimum.at(first, tenants, np.arange(num))
    return first


def next_position(position: int, tenants: LongArray, is_left: BoolArray, tenant: int) -> int:
    """The first position [n] behind this one that is left of the tenant; n: none is."""
    for first in range(position + 1, len(tenants), SOME):
        is_theirs = tenants[first : first + SOME] == tenant
        is_next = is_theirs & is_left[first : first + SOME]
        if is_next.any():
            return first + int(np.argmax(is_next))
    return len(tenants)


def wants_oldest_of(since_oldest: LongArray, oldest: LongArray, num_overdue: int) -> BoolArray:
    """By tenant, whether its next turn is for its oldest request, at position `oldest` [tenants].

    The first `num_overdue` positions are overdue.
    """
    is_overdue = oldest < num_overdue
    is_turn_of_oldest = since_oldest >= TURNS - 1
    wants: BoolArray = is_turn_of_oldest & is_overdue
    return wants


class Walk:
    """Which request is next among those that are left at `indices` [n].

    Positions [n] count them in the order of arrival; the first `num_overdue` are overdue. The
    caller writes `service` and `since_oldest` [tenants] as it admits.

        position      0  1  2  3  4  5        oldest of tenant 1: 0, of tenant 2: 1
        tenant        1  2  1  1  2  1
        cached       64  0 -1 32  0  0        -1: taken
    """

    def __init__(
        self,
        table: WaitingTable,
        indices: LongArray,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
    ) -> None:
        self.service = service
        self.since_oldest = since_oldest
        self._table = table
        self._indices = indices
        self._num_overdue = num_overdue
        self._tenants: LongArray = table.tag.take(indices)  # [n]
        self._cached: LongArray = table.cached_len.take(indices)  # [n]; TAKEN: it is not left
        self._is_left: BoolArray = np.ones(len(indices), dtype=np.bool_)
        # By tenant, its first position that is left; n: none is.
        self._oldest = first_positions(self._tenants, len(service))
        self._positions: dict[int, LongArray] = {}  # of tenants that had the least service

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn]:
        """The position of the next request.

        `may_leave_due`: for its cached prefix, another tenant's may go before that of the tenant
        whose turn it is.
        """
        is_left = self._oldest < len(self._tenants)
        served = np.where(is_left, self.service, np.inf)
        least = served.min()
        wants_oldest = wants_oldest_of(self.since_oldest, self._oldest, self._num_overdue)
        # Of equally served tenants, the one whose request came first.
        ties = np.flatnonzero(served == least)
        first_of_ties = np.argmin(self._oldest[ties])
        due = int(ties[first_of_ties])
        if wants_oldest[due]:
            position = int(self._oldest[due])
        else:
            position = self._longest_of(due)
        # As a rule nobody has a longer one, and the tenants need not be looked at.
        if may_leave_due and self._cached[position] < self._cached.max():
            may_go = served <= least + QUANTUM
            rival = self._rival(may_go, wants_oldest)
            if self._cached[rival] > self._cached[position]:
                position = rival
        tenant = int(self._tenants[position])
        turn = TenantTurn(
            is_due=tenant == due,
            is_oldest=bool(wants_oldest[tenant]),
        )
        return position, turn

    def cost(self, position: int) -> int:
        """Tokens to compute of the request at this position."""
        return cost_of(self._table, int(self._indices[position]))

    def take(self, position: int) -> int:
        """The request at this position is not left any more. Returns its tenant."""
        tenant = int(self._tenants[position])
        self._cached[position] = TAKEN
        self._is_left[position] = False
        if self._oldest[tenant] == position:
            self._oldest[tenant] = next_position(position, self._tenants, self._is_left, tenant)
        return tenant

    def _rival(self, may_go: BoolArray, wants_oldest: BoolArray) -> int:
        """The longest cached prefix of the tenants that may go.

        A tenant that wants its oldest offers that one alone.
        """
        may_go_freely = may_go & ~wants_oldest
        is_free = may_go_freely.take(self._tenants)
        best = self._longest(is_free)
        oldest = self._oldest[may_go & wants_oldest]
        if not len(oldest):
            return best
        longest_of_oldest = np.argmax(self._cached[oldest])
        other = int(oldest[longest_of_oldest])
        if not is_free.any():
            return other  # all that may go want their oldest, and `best` is of none of them
        if self._cached[best] >= self._cached[other]:
            return best
        return other

    def _longest_of(self, tenant: int) -> int:
        """The longest cached prefix of those of a tenant that are left, the first of equals."""
        positions = self._positions.get(tenant)
        if positions is None:
            positions = np.flatnonzero(self._tenants == tenant)
            self._positions[tenant] = positions
        if len(positions) == len(self._cached):
            return int(np.argmax(self._cached))
        return int(positions[np.argmax(self._cached.take(positions))])

    def _longest(self, chosen: BoolArray) -> int:
        """The longest cached prefix of those `chosen` [n] that are left, the first of equals."""
        if chosen.all():
            return int(np.argmax(self._cached))
        cached = np.where(chosen, self._cached, TAKEN)
        return int(np.argmax(cached))


POLICY = Fair

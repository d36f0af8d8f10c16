"""Fair shares for tenants: who has been served least goes first, weighted.

Each tenant has a counter of the service that it was given: tokens computed of its prompts, and tokens
generated, which cost more, divided by its weight. Source: VTC, arXiv:2401.00588. A tenant that begins
to wait begins at the least counter of those that wait already: it saves up nothing while it wants
nothing. Among the tenants that are at most `QUANTUM` ahead of the least served one, the longest cached
prefix goes first: so much unfairness may the cache buy, and no more, and one of four turns is always
of the least served. Source: D2LPM, arXiv:2501.14312.

**Bound.** Two tenants that both have a ready request waiting all the while are given, in any span of
time, service per weight that differs by at most 2 U, with

    U = QUANTUM + the larger of the two tenants' (L + DECODE_COST * G) / weight

where L is the longest prompt in tokens, and G the tokens that those requests of one tenant that have
begun at a time may still generate: at most `max_running_requests` times the longest output, and at
most the KV pool where nobody is taken back. For a tenant is admitted only while its counter is at most
QUANTUM above the least, and until it is admitted again only what had begun adds to it. (VTC has
max(L, DECODE_COST * M) for U: no QUANTUM, and a pool of M tokens that holds all that those who run
will ever need.) Nothing else goes before this order but requests that resume, which are not paid for
again; how long somebody has waited counts among the requests of one tenant alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray, LongArray
from weft.scheduler.policy import TURNS, Policy, PolicyContext
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import DoubleArray, WaitingTable

DECODE_COST = 2.0  # of a generated token, in tokens of a prompt
QUANTUM = 4_096.0  # service by which a tenant may be ahead and still go first for its cached prefix
NO_TENANT = 0


class Fair(Policy):
    """Tenants have numbers from 1 on; one that wants nothing and is not ahead of the others is forgotten."""

    reads_cache = True
    ages = False  # here, within each tenant

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        num_rows = len(context.columns.seq_len)
        self._shares = dict(context.settings.tenant_weights)
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._waiting: set[int] = set()  # numbers of requests that have not run under this policy
        self._floor = 0.0  # the least counter of tenants that wait, as of the last look
        self._since_due = 0  # admissions since the last of the tenant whose turn it was
        self._turns: dict[int, Turn] = {}  # as what the last order named a request, by its number
        self._passed_over: Request | None = (
            None  # the last that was named and cannot be admitted now
        )
        # by tenant
        self._service = np.zeros(1, dtype=np.float64)
        self._weight = np.ones(1, dtype=np.float64)
        self._num_waiting = np.zeros(1, dtype=np.int64)  # requests that never ran
        self._num_rows = np.zeros(1, dtype=np.int64)  # that its requests have
        self._since_oldest = np.zeros(
            1, dtype=np.int64
        )  # admissions since the last that was overdue and the oldest
        # by row
        self._tenant = np.zeros(num_rows, dtype=np.int64)
        self._first_len = np.zeros(
            num_rows, dtype=np.int64
        )  # sequence length with which it got its row

    # A request comes and goes

    def arrived(self, request: Request) -> int:
        tenant = self._number(request.tenant)
        if not self._num_waiting[tenant]:
            self._service[tenant] += max(self._least() - self._served()[tenant], 0.0)
        self._num_waiting[tenant] += 1
        self._waiting.add(request.arrival_order)
        return tenant

    def dropped(self, request: Request) -> None:
        if request.arrival_order in self._waiting:
            self._waiting.remove(request.arrival_order)
            self._num_waiting[self._numbers[request.tenant]] -= 1

    def passed_over(self, request: Request) -> None:
        self._passed_over = request

    def admitted(self, request: Request) -> None:
        row, tenant = request.row, self._number(request.tenant)
        if (
            request.arrival_order in self._waiting
        ):  # else it was taken back: to compute anew what it had is no service
            self._waiting.remove(request.arrival_order)
            self._num_waiting[tenant] -= 1
            self._service[tenant] += (request.fill_len - request.cached_len) / self._weight[tenant]
            turn = self._turns.get(request.arrival_order, NO_TURN)
            self._since_due = 0 if turn.is_due else self._since_due + 1
            self._since_oldest[tenant] = 0 if turn.is_oldest else self._since_oldest[tenant] + 1
        self._num_rows[tenant] += 1
        self._tenant[row] = tenant
        self._first_len[row] = request.fill_len

    def left(self, request: Request) -> None:
        row, tenant = request.row, int(self._tenant[request.row])
        if tenant != NO_TENANT:
            self._service += self._unpaid(np.array([row], dtype=np.int32))
            self._tenant[row] = NO_TENANT
            self._num_rows[tenant] -= 1

    def displaced(
        self, waiting: WaitingTable, lines: IntArray, newcomer: Request
    ) -> Iterator[Request]:
        """The latest of the tenant that has most waiting for its weight, while others have more than the newcomer's."""
        tenants: LongArray = waiting.tag[lines]  # a copy: those that have gone are NO_TENANT
        own = self._numbers[newcomer.tenant]
        num_left = np.bincount(tenants, minlength=len(self._weight))
        while True:
            load = num_left / self._weight
            most = int(np.argmax(load))
            if load[most] <= load[own]:
                return
            last = len(lines) - 1 - int(np.argmax((tenants == most)[::-1]))
            yield waiting.at(int(lines[last]))
            tenants[last] = NO_TENANT
            num_left[most] -= 1

    # Who is next

    def order(self, waiting: WaitingTable, lines: IntArray, now: float) -> Iterator[Request]:
        """As if each that is named were admitted at once, unless it is `passed_over`."""
        self._turns = {}
        walk = Walk(
            waiting,
            lines,
            self._served(),
            self._since_oldest.copy(),
            self._num_overdue(waiting, lines, now),
        )
        since_due = self._since_due
        for _ in range(len(lines)):
            place, turn = walk.next(may_leave_due=since_due < TURNS - 1)
            request = waiting.at(int(lines[place]))
            self._turns[request.arrival_order] = turn
            self._passed_over = None
            yield request
            tenant = walk.take(place)
            if self._passed_over is request:
                continue
            walk.service[tenant] += walk.cost[place] / self._weight[tenant]
            walk.since_oldest[tenant] = 0 if turn.is_oldest else walk.since_oldest[tenant] + 1
            since_due = 0 if turn.is_due else since_due + 1

    def _num_overdue(self, waiting: WaitingTable, lines: IntArray, now: float) -> int:
        """The first so many of `lines` have waited too long."""
        aging_s = self.context.settings.aging_s
        if not aging_s:
            return 0
        return int(np.searchsorted(waiting.arrival_s[lines], now - aging_s, side="right"))

    # Tenants

    def _number(self, name: str) -> int:
        """The number of a tenant. A new one begins with the least service of those that wait."""
        tenant = self._numbers.get(name)
        if tenant is None:
            least = self._least()
            if not self._free:
                self._forget_idle(least)
            tenant = self._numbers[name] = self._new_number()
            self._service[tenant] = least
            self._weight[tenant] = self._shares.get(name, 1.0)
            self._num_waiting[tenant] = 0
            self._num_rows[tenant] = 0
            self._since_oldest[tenant] = 0
        return tenant

    def _new_number(self) -> int:
        if not self._free:
            size = len(self._service)
            none = np.zeros(size, dtype=np.int64)
            self._service = np.concatenate([self._service, np.zeros(size)])
            self._weight = np.concatenate([self._weight, np.ones(size)])
            self._num_waiting = np.concatenate([self._num_waiting, none])
            self._num_rows = np.concatenate([self._num_rows, none])
            self._since_oldest = np.concatenate([self._since_oldest, none])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def _least(self) -> float:
        """The least counter of tenants with waiting requests; never falls. If there are none, all are even again."""
        served, waits = self._served(), self._num_waiting > 0
        least = served[waits].min() if waits.any() else served.max()
        self._floor = max(self._floor, float(least))
        return self._floor

    def _served(self) -> DoubleArray:
        """By tenant, the service that it has been given per weight."""
        served: DoubleArray = self._service + self._unpaid(self.context.running.rows)
        return served

    def _unpaid(self, rows: IntArray) -> DoubleArray:
        """By tenant, what `rows` have generated under it; it is paid when a request leaves its row."""
        tenants = self._tenant[rows]
        generated = self.context.columns.known_len[rows] - self._first_len[rows]
        cost = np.where(tenants != NO_TENANT, generated * DECODE_COST / self._weight[tenants], 0.0)
        return np.bincount(tenants, weights=cost, minlength=len(self._service)).astype(
            np.float64, copy=False
        )

    def _forget_idle(self, least: float) -> None:
        """Forget tenants without requests that would be lifted anyway when they come back."""
        is_idle = (self._num_waiting + self._num_rows == 0) & (self._service <= least)
        for name, tenant in list(self._numbers.items()):
            if is_idle[tenant]:
                del self._numbers[name]
                self._free.append(tenant)


class Turn(NamedTuple):
    """Why a request was named next."""

    is_due: bool  # its tenant was the least served
    is_oldest: bool  # it was overdue, and its tenant's turn for such a one had come


NO_TURN = Turn(is_due=False, is_oldest=False)


class Walk:
    """Who is next among the requests that are left of `lines` [n]. Places [n] count them in the order of arrival.

    `service` and `since_oldest` [tenants] are written by whoever walks; the first `num_overdue` places are overdue.
    """

    def __init__(
        self,
        waiting: WaitingTable,
        lines: IntArray,
        service: DoubleArray,
        since_oldest: LongArray,
        num_overdue: int,
    ) -> None:
        num_tenants, num_places = len(service), len(lines)
        cached = waiting.cached_len[lines]
        self.service = service
        self.since_oldest = since_oldest
        self.cost: LongArray = waiting.fill_len[lines] - cached
        self._num_overdue = num_overdue
        self._tenants: LongArray = waiting.tag[lines]  # [n]
        self._cached = cached.astype(np.int64)  # [n]; below 0: it is not left
        self._oldest: LongArray = np.full(
            num_tenants, num_places
        )  # the first place that is left; n: none is
        self._oldest[self._tenants[::-1]] = np.arange(
            num_places - 1, -1, -1
        )  # of several, the last one stays

    def next(self, *, may_leave_due: bool) -> tuple[int, Turn]:
        """The place of the next request. `may_leave_due`: for its cached prefix another tenant's may go before that of
        the tenant whose turn it is."""
        is_left = self._oldest < len(self._tenants)
        served = np.where(is_left, self.service, np.inf)
        least = served.min()
        wants_oldest = (self.since_oldest >= TURNS - 1) & (self._oldest < self._num_overdue)
        ties = np.flatnonzero(served == least)
        due = int(ties[np.argmin(self._oldest[ties])])
        place = int(self._oldest[due]) if wants_oldest[due] else self._longest(self._tenants == due)
        if may_leave_due:
            other = self._rival(served <= least + QUANTUM, wants_oldest)
            if self._cached[other] > self._cached[place]:
                place = other
        tenant = int(self._tenants[place])
        return place, Turn(is_due=tenant == due, is_oldest=bool(wants_oldest[tenant]))

    def take(self, place: int) -> int:
        """The request of this place is left no more. Returns its tenant."""
        tenant = int(self._tenants[place])
        self._cached[place] = -1
        if self._oldest[tenant] == place:
            later = (self._tenants[place:] == tenant) & (self._cached[place:] >= 0)
            self._oldest[tenant] = (
                place + int(np.argmax(later)) if later.any() else len(self._tenants)
            )
        return tenant

    def _rival(self, may_go: BoolArray, wants_oldest: BoolArray) -> int:
        """The longest cached prefix of the tenants that may go; of those that want their oldest, that of this one."""
        is_free = (may_go & ~wants_oldest)[self._tenants]
        best = self._longest(is_free)
        oldest = self._oldest[may_go & wants_oldest]
        if not len(oldest):
            return best
        other = int(oldest[np.argmax(self._cached[oldest])])
        if not is_free.any():
            return other  # all that may go want their oldest, and `best` is nobody's
        return best if self._cached[best] >= self._cached[other] else other

    def _longest(self, chosen: BoolArray) -> int:
        """The place with the longest cached prefix of those `chosen` [n] that are left, the first of equals."""
        return int(np.argmax(np.where(chosen, self._cached, -1)))

"""Which request is next under `fair`: that of the tenant with least service which is the first in
the order within it, or its oldest; or that of another one, which has a longer cached prefix.

    served  least ............... least + QUANTUM ..............
            due                                   |  ahead: they wait
            |------ may go for a longer prefix ---|

For each request all tenants are looked at, which is the fastest way to a few; `long_walk.py` has
another one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import BoolArray, LongArray
from weft.scheduler.policy import TURNS
from weft.scheduler.tenants.left import TenantsLeft
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray

QUANTUM = 4_096.0  # service by which a tenant may be ahead and still go first for its cached prefix


class TenantTurn(NamedTuple):
    """Why a request was named next."""

    tenant: int
    is_due: bool  # it was the least served
    is_oldest: bool  # it was overdue, and the tenant's turn for such a one had come


class NextTenant(Protocol):
    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        """The arrival of the next request; None: none is left.

        `may_leave_due`: for its cached prefix, another tenant's may go before that of the tenant
        whose turn it is.
        """
        ...

    def take(self, arrival: int, turn: TenantTurn, service: float | None) -> None:
        """This request, which was named with this turn, is not left any more. Its tenant has so
        much more service per weight; None: it is not admitted, and costs the tenant nothing."""
        ...


class Walk:
    """`service` and `since_oldest` [tenants] are its own: it counts as if all that it names were
    admitted."""

    def __init__(
        self,
        left: TenantsLeft,
        *,
        service: DoubleArray,
        since_oldest: LongArray,
        overdue_end: int,
        may_leave_due: bool = True,
    ) -> None:
        """Those that came before the arrival `overdue_end` are overdue. `may_leave_due`: the first
        key of the lanes is that of the longest cached prefix, for which another tenant's may go
        before."""
        self.left = left
        self.service = service
        self.since_oldest = since_oldest
        self.overdue_end = overdue_end
        self.may_leave_due = may_leave_due

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        left = self.left
        is_left = left.oldest < EVERYBODY
        served = np.where(is_left, self.service, np.inf)
        least = served.min()
        if least == np.inf:
            return None
        # By tenant, whether its next turn is for its oldest request.
        is_turn_of_oldest = self.since_oldest >= TURNS - 1
        wants_oldest = is_turn_of_oldest & (left.oldest < self.overdue_end)
        # Of equally served tenants, the one whose request came first.
        ties = np.flatnonzero(served == least)
        due = int(ties[np.argmin(left.oldest[ties])])
        tenant = due
        key = float(left.best_key[due])
        if wants_oldest[due]:
            arrival = int(left.oldest[due])
            key = left.key_of(arrival)
        else:
            arrival = left.next_of(due, int(left.best[due]), int(left.oldest[due]))
        # As a rule nobody has a longer prefix, and the tenants need not be looked at.
        if self.may_leave_due and may_leave_due and key > left.best_key.min():
            may_go = served <= least + QUANTUM
            tenant, arrival = self._rival(due, arrival, key, may_go, wants_oldest)
        is_oldest = bool(wants_oldest[tenant])
        turn = TenantTurn(tenant, is_due=tenant == due, is_oldest=is_oldest)
        return arrival, turn

    def take(self, arrival: int, turn: TenantTurn, service: float | None) -> None:
        tenant = turn.tenant
        self.left.take(tenant, arrival)
        if service is None:
            return
        self.service[tenant] += service
        if turn.is_oldest:
            self.since_oldest[tenant] = 0
        else:
            self.since_oldest[tenant] += 1

    def _rival(
        self, due: int, arrival: int, key: float, may_go: BoolArray, wants_oldest: BoolArray
    ) -> tuple[int, int]:
        """Tenant and arrival of the longest cached prefix of the tenants that may go, if it is
        longer than that of the request that is due.

        A tenant that wants its oldest offers that one alone.
        """
        left = self.left
        tenant = due
        keys = np.where(may_go & ~wants_oldest, left.best_key, np.inf)
        longest = keys.min()
        if longest < key:
            # Of equals, the one that came first.
            ties = np.flatnonzero(keys == longest)
            tenant = int(ties[np.argmin(left.best[ties])])
            arrival = int(left.best[tenant])
            key = float(longest)
        for other in np.flatnonzero(may_go & wants_oldest).tolist():
            oldest = int(left.oldest[other])
            if left.key_of(oldest) < key:
                tenant = other
                arrival = oldest
                key = left.key_of(oldest)
        return tenant, arrival

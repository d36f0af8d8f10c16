"""Chooses the next request under `fair`: the first or the oldest one of the least served tenant, or
a request of another tenant with a longer cached prefix.

    served  least ............... least + QUANTUM ..............
            due                                   |  ahead: they wait
            |------ may go for a longer prefix ---|

All tenants are scanned for each request, which is the fastest way for a few requests;
`long_walk.py` has another way for many.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import BoolArray, LongArray
from weft.scheduler.policies.protocol import TURNS
from weft.scheduler.policies.tenants.left import TenantsLeft
from weft.scheduler.waiting_table import EVERYBODY, DoubleArray

QUANTUM = 4_096.0  # a tenant that is ahead by at most this may go first for its cached prefix


class TenantTurn(NamedTuple):
    """Why a request was named next."""

    tenant: int
    is_due: bool  # its tenant was the least served
    is_oldest: bool  # it was overdue, and it was the turn of the tenant's oldest request


class NextTenant(Protocol):
    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        """The arrival order of the next request; None: no request is left.

        `may_leave_due`: a request of another tenant may go before that of the least served tenant
        if its cached prefix is longer.
        """
        ...

    def take(self, arrival: int, turn: TenantTurn, service: float | None) -> None:
        """Remove a request that was named with this turn, and add `service` per weight to its
        tenant; None: it is not admitted, and its tenant is not charged."""
        ...


class Walk:
    """Owns copies `service` and `since_oldest` [tenants]: it counts every named request as
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
        """Requests with an arrival order below `overdue_end` are overdue. `may_leave_due`: the
        first key of the lanes is the longest cached prefix, for which another tenant may go
        first."""
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
        # Among equally served tenants, the one with the oldest request.
        ties = np.flatnonzero(served == least)
        due = int(ties[np.argmin(left.oldest[ties])])
        tenant = due
        key = float(left.best_key[due])
        if wants_oldest[due]:
            arrival = int(left.oldest[due])
            key = left.key_of(arrival)
        else:
            arrival = left.next_of(due, int(left.best[due]), int(left.oldest[due]))
        # Usually no tenant has a longer prefix, and no further scan is needed.
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
        """Tenant and arrival order of the longest cached prefix among the tenants that may go, if
        it is longer than that of the least served tenant's request.

        If it is the turn of a tenant's oldest request, the tenant offers only that one.
        """
        left = self.left
        tenant = due
        keys = np.where(may_go & ~wants_oldest, left.best_key, np.inf)
        longest = keys.min()
        if longest < key:
            # Among equal ones, the oldest.
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

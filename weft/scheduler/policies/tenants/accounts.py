"""The accounts of tenants: the service of each, and its numbers of waiting requests and rows."""

from __future__ import annotations

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.waiting_table import DoubleArray


class Tenants:
    """The accounts of the tenants, by number from 1 on.

    A tenant without requests whose counter is not ahead of the others is forgotten, and another
    tenant gets its number.
    """

    def __init__(self, shares: dict[str, float]) -> None:
        self._shares = shares
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        # By number; the arrays double together.
        # service already added, divided by the weight
        self.service: DoubleArray = np.zeros(1, dtype=np.float64)
        self.weight: DoubleArray = np.ones(1, dtype=np.float64)
        self.num_waiting: LongArray = np.zeros(1, dtype=np.int64)  # requests that never ran
        self.num_rows: LongArray = np.zeros(1, dtype=np.int64)  # rows of its requests
        # Admissions since the last one in which the tenant's oldest request was overdue.
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
        """Forget tenants without requests whose counters would be raised anyway at their return."""
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

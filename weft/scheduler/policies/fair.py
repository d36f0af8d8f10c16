"""Fair shares for tenants (the `user` of a request): who has been served least goes first, weighted.

Each tenant has a counter of the service that it was given: tokens computed of its prompts, and tokens generated, which
cost more, divided by its weight. Source: VTC, arXiv:2401.00588. A tenant that comes back begins at the least counter
of those that are active: it saves up nothing while it is away. Among the tenants that are at most `QUANTUM` ahead of
the least served one, the longest cached prefix goes first: so much unfairness may the cache buy, and no more. Source:
D2LPM, arXiv:2501.14312.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.executor.plan import IntArray
from weft.scheduler.policy import Policy, Scene
from weft.scheduler.request import Request
from weft.scheduler.waiting import DoubleArray, Waiting

DECODE_COST = 2.0  # of a generated token, in tokens of a prompt
QUANTUM = 4_096.0  # service by which a tenant may be ahead and still go first for its cached prefix
NO_TENANT = 0


class Fair(Policy):
    """Tenants have numbers from 1 on; one that is idle and not ahead of the others is forgotten."""

    reads_cache = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        num_rows = len(scene.columns.seq_len)
        self._shares = dict(scene.settings.tenant_weights)
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._waiting: set[int] = set()  # numbers of requests that have not run under this policy
        self._floor = 0.0  # the least counter of active tenants, as of the last look
        # by tenant
        self._service = np.zeros(1, dtype=np.float64)
        self._weight = np.ones(1, dtype=np.float64)
        self._num_open = np.zeros(1, dtype=np.int64)  # requests that wait or run
        # by row
        self._tenant = np.zeros(num_rows, dtype=np.int64)
        self._first_len = np.zeros(num_rows, dtype=np.int64)  # sequence length with which it got its row

    def arrived(self, request: Request) -> int:
        tenant = self._enter(request.user)
        self._num_open[tenant] += 1
        self._waiting.add(request.arrival)
        return tenant

    def dropped(self, request: Request) -> None:
        self._waiting.remove(request.arrival)
        self._num_open[self._numbers[request.user]] -= 1

    def admitted(self, request: Request) -> None:
        row = request.row
        if request.arrival in self._waiting:
            self._waiting.remove(request.arrival)
            tenant = self._numbers[request.user]
            self._service[tenant] += (request.fill_len - request.cached_len) / self._weight[tenant]
        else:  # it was taken back: to compute anew what it had is no service
            tenant = self._enter(request.user)
            self._num_open[tenant] += 1
        self._tenant[row], self._first_len[row] = tenant, request.fill_len

    def left(self, request: Request) -> None:
        row, tenant = request.row, int(self._tenant[request.row])
        if tenant != NO_TENANT:
            self._service += self._unpaid(np.array([row], dtype=np.int32))
            self._tenant[row] = NO_TENANT
            self._num_open[tenant] -= 1

    def order(self, waiting: Waiting, lines: IntArray, now: float) -> Iterator[Request]:
        tenants = waiting.tag[lines]
        cached = waiting.cached_len[lines]
        cost = (waiting.fill_len[lines] - cached) / self._weight[tenants]
        service = self._service + self._unpaid(self.scene.running.rows)
        num_left = np.bincount(tenants, minlength=len(service))
        value = cached.astype(np.float64)  # of each line that is left; -1: not now
        for _ in range(len(lines)):
            served = np.where(num_left > 0, service, np.inf)
            may_go = served <= served.min() + QUANTUM
            best = int(np.argmax(np.where(may_go[tenants], value, -1.0)))
            yield waiting.at(int(lines[best]))
            value[best] = -2.0
            num_left[tenants[best]] -= 1
            service[tenants[best]] += cost[best]  # as if it had been admitted

    def service(self, user: str) -> float:
        """What a tenant has been given, weighted, since it was last forgotten."""
        if user not in self._numbers:
            return self._floor
        return float((self._service + self._unpaid(self.scene.running.rows))[self._numbers[user]])

    def _enter(self, user: str) -> int:
        """The number of a tenant. One that has nothing open is lifted to the least served of those that have."""
        tenant = self._numbers.get(user)
        if tenant is None:
            if not self._free:
                self._forget_idle()
            tenant = self._numbers[user] = self._new_number()
            self._service[tenant] = 0.0
            self._weight[tenant] = self._shares.get(user, 1.0)
            self._num_open[tenant] = 0
        if not self._num_open[tenant]:
            self._service[tenant] = max(self._service[tenant], self._least())
        return tenant

    def _new_number(self) -> int:
        if not self._free:
            size = len(self._service)
            self._service = np.concatenate([self._service, np.zeros(size)])
            self._weight = np.concatenate([self._weight, np.ones(size)])
            self._num_open = np.concatenate([self._num_open, np.zeros(size, dtype=np.int64)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def _least(self) -> float:
        """The least counter of tenants with open requests; never falls. If there are none, all are even again."""
        active = self._num_open > 0
        if active.any():
            service = self._service + self._unpaid(self.scene.running.rows)
            self._floor = max(self._floor, float(service[active].min()))
        else:
            self._floor = max(self._floor, float(self._service.max()))
        return self._floor

    def _unpaid(self, rows: IntArray) -> DoubleArray:
        """By tenant, what `rows` have generated under it; it is paid when a request leaves its row."""
        tenants = self._tenant[rows]
        generated = self.scene.columns.known_len[rows] - self._first_len[rows]
        cost = np.where(tenants != NO_TENANT, generated * DECODE_COST / self._weight[tenants], 0.0)
        return np.bincount(tenants, weights=cost, minlength=len(self._service)).astype(np.float64, copy=False)

    def _forget_idle(self) -> None:
        """Forget idle tenants that would be lifted anyway when they come back."""
        least = self._least()
        for name, tenant in list(self._numbers.items()):
            if not self._num_open[tenant] and self._service[tenant] <= least:
                del self._numbers[name]
                self._free.append(tenant)

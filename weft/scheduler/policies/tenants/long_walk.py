"""A `Walk` for many requests: the same requests in the same order, with the tenants in heaps.

A tenant is pushed again whenever its values have changed, and its version tells which entry is
valid. So each request costs as much as moving one tenant in a heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.scheduler.policies.lanes.lane import Entry
from weft.scheduler.policies.protocol import TURNS
from weft.scheduler.policies.tenants.left import NO_ENTRY, TenantsLeft
from weft.scheduler.policies.tenants.walk import QUANTUM, TenantTurn, Walk
from weft.scheduler.waiting_table import EVERYBODY


class Standing:
    """The remaining requests of a tenant, with the columns of `TenantsLeft` as fields."""

    __slots__ = ("best", "best_key", "by_age", "in_order", "oldest", "service", "since", "version")

    def __init__(self, left: TenantsLeft, tenant: int, service: float, since: int) -> None:
        self.by_age: Iterator[Entry] | None = None  # the rest of its lane, after the first use
        self.in_order: Iterator[Entry] | None = None
        self.oldest = int(left.oldest[tenant])
        self.best = int(left.best[tenant])
        self.best_key = float(left.best_key[tenant])
        self.service = service
        self.since = since  # admissions since the last one in which its oldest request was overdue
        self.version = 0


class Offer(NamedTuple):
    """The offer of a tenant that may go first for a longer cached prefix: the lowest goes first."""

    key: float
    is_oldest: bool  # for its oldest request; sorted after others with an equal key
    tie: int  # arrival order of the request, or the tenant's number if `is_oldest`
    tenant: int
    version: int


class LongWalk:
    def __init__(self, walk: Walk) -> None:
        """Continues where `walk` is; `walk` is not used any more."""
        left = walk.left
        self._left = left
        self._overdue_end = walk.overdue_end
        self._may_leave_due = walk.may_leave_due
        tenants = np.flatnonzero(left.oldest < EVERYBODY)
        service = walk.service[tenants].tolist()
        since = walk.since_oldest[tenants].tolist()
        self._standings: dict[int, Standing] = {}
        # Service, oldest arrival order, tenant, version: the first is the least served.
        self._due: list[tuple[float, int, int, int]] = []
        self._offers: list[Offer] = []
        # Service, tenant, version of the tenants that are too far ahead for an offer.
        self._ahead: list[tuple[float, int, int]] = []
        self._most = 0.0  # service up to which tenants may make offers; it never falls
        for tenant, paid, admitted in zip(tenants.tolist(), service, since, strict=True):
            standing = Standing(left, tenant, paid, admitted)
            self._standings[tenant] = standing
            self._enter(tenant, standing)

    def next(self, *, may_leave_due: bool) -> tuple[int, TenantTurn] | None:
        standings = self._standings
        heap = self._due
        while heap and heap[0][3] != standings[heap[0][2]].version:
            heapq.heappop(heap)
        if not heap:
            return None
        least, _, due, _ = heap[0]
        standing = standings[due]
        is_oldest = self._wants_oldest(standing)
        if is_oldest:
            arrival = standing.oldest
            key = self._left.key_of(arrival)
        else:
            arrival = self._left.next_of(due, standing.best, standing.oldest)
            key = standing.best_key
        if self._may_leave_due and may_leave_due:
            self._most = least + QUANTUM
            offer = self._longest_offer()
            if offer.key < key:
                other = standings[offer.tenant]
                arrival = other.oldest if offer.is_oldest else other.best
                turn = TenantTurn(offer.tenant, offer.tenant == due, offer.is_oldest)
                return arrival, turn
        return arrival, TenantTurn(due, True, is_oldest)

    def take(self, arrival: int, turn: TenantTurn, service: float | None) -> None:
        standing = self._standings[turn.tenant]
        left = self._left
        left.taken.add(arrival)
        if service is not None:
            standing.service += service
            standing.since = 0 if turn.is_oldest else standing.since + 1
        standing.version += 1
        if standing.oldest == arrival:
            if standing.by_age is None:
                standing.by_age = left.rest_by_age(turn.tenant)
            standing.oldest = next(standing.by_age, NO_ENTRY)[-1]
        if standing.best == arrival:
            if standing.in_order is None:
                standing.in_order = left.rest_in_order(turn.tenant)
            following = next(standing.in_order, NO_ENTRY)
            standing.best_key = following[0]
            standing.best = following[-1]
        if standing.oldest < EVERYBODY:
            self._enter(turn.tenant, standing)

    def _enter(self, tenant: int, standing: Standing) -> None:
        heapq.heappush(self._due, (standing.service, standing.oldest, tenant, standing.version))
        if not self._may_leave_due:
            return
        if standing.service <= self._most:
            self._offer(tenant, standing)
        else:
            heapq.heappush(self._ahead, (standing.service, tenant, standing.version))

    def _offer(self, tenant: int, standing: Standing) -> None:
        if self._wants_oldest(standing):
            key = self._left.key_of(standing.oldest)
            offer = Offer(key, True, tenant, tenant, standing.version)
        else:
            offer = Offer(standing.best_key, False, standing.best, tenant, standing.version)
        heapq.heappush(self._offers, offer)

    def _longest_offer(self) -> Offer:
        """The best offer of the tenants that may go; one of them is the least served."""
        standings = self._standings
        while self._ahead and self._ahead[0][0] <= self._most:
            _, tenant, version = heapq.heappop(self._ahead)
            if version == standings[tenant].version:
                self._offer(tenant, standings[tenant])
        offers = self._offers
        while offers[0].version != standings[offers[0].tenant].version:
            heapq.heappop(offers)
        return offers[0]

    def _wants_oldest(self, standing: Standing) -> bool:
        """Whether the next turn of a tenant is for its oldest request."""
        return standing.since >= TURNS - 1 and standing.oldest < self._overdue_end

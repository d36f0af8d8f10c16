"""Requests that take too long: ended wherever they are, by what the clock says when the next step
is chosen.

Three limits: a request's own (`timeout_ms`, from its arrival), and for all the longest wait for the
first admission (`max_queue_s`) and the longest run from there on (`max_run_s`). A request that is
taken back to the queue has begun: only its own limit and `max_run_s` count then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

from weft.scheduler.request import Request

MAX_STALE = 1_024  # entries of requests that have ended, before the heap is cleaned


class Limit(IntEnum):
    OWN = 0
    QUEUE = 1
    RUN = 2


class Entry(NamedTuple):
    when_s: float
    arrival_order: int
    id: int
    limit: Limit
    span_s: float


class Expired(NamedTuple):
    """A request whose time is over."""

    request: Request
    message: str
    status: int  # as an HTTP status: 503 if it has never run, else 408


class Deadlines:
    """A heap of deadlines; those of requests that have ended are dropped when they come up."""

    def __init__(self, *, max_queue_s: float, max_run_s: float) -> None:
        """0: no limit."""
        self._max_queue_s = max_queue_s or math.inf
        self._max_run_s = max_run_s or math.inf
        self._heap: list[Entry] = []

    def arrived(self, request: Request, timeout_ms: int) -> None:
        if timeout_ms:
            self._push(request.spec.arrival_s, request, Limit.OWN, timeout_ms / 1_000)
        if self._max_queue_s < math.inf:
            self._push(request.spec.arrival_s, request, Limit.QUEUE, self._max_queue_s)

    def admitted(self, request: Request) -> None:
        """For the first time."""
        if self._max_run_s < math.inf:
            self._push(request.admitted_s, request, Limit.RUN, self._max_run_s)

    def forget(self, request: Request) -> None:
        """The request did not come after all."""
        self._heap = [
            entry for entry in self._heap if entry.arrival_order != request.spec.arrival_order
        ]
        heapq.heapify(self._heap)

    def end_s(self, request: Request) -> float:
        """When an open request is ended, as far as that is known; infinite if nothing ends it."""
        own_s = request.message.timeout_ms / 1_000 if request.message.timeout_ms else math.inf
        if request.admitted_s < 0:
            limit_s = request.spec.arrival_s + self._max_queue_s
        else:
            limit_s = request.admitted_s + self._max_run_s
        return min(request.spec.arrival_s + own_s, limit_s)

    @property
    def next_s(self) -> float:
        """When to look again; infinite if there is no deadline. May be that of a request which has
        ended."""
        return self._heap[0].when_s if self._heap else math.inf

    def expired(self, requests: Mapping[int, Request], now: float) -> Iterator[Expired]:
        """The requests among the open ones whose time is over. The caller ends each before it takes
        the next."""
        heap = self._heap
        while heap and heap[0].when_s <= now:
            entry = heap[0]
            late = self._late(entry, requests)
            if late is not None:
                yield late
            heapq.heappop(heap)  # only now: a request whose end raised is found again
        if len(heap) > 4 * len(requests) + MAX_STALE:
            self._heap = [entry for entry in heap if entry.id in requests]
            heapq.heapify(self._heap)

    @staticmethod
    def _late(entry: Entry, requests: Mapping[int, Request]) -> Expired | None:
        """Whom a deadline that has passed ends; nobody if the request has ended, or has done what
        was asked in time."""
        request = requests.get(entry.id)
        if request is None or request.spec.arrival_order != entry.arrival_order:
            return None
        has_run = request.admitted_s >= 0
        if entry.limit is Limit.QUEUE and has_run:
            return None
        return Expired(request, _message(entry, has_run), 408 if has_run else 503)

    def _push(self, from_s: float, request: Request, limit: Limit, span_s: float) -> None:
        heapq.heappush(
            self._heap,
            Entry(from_s + span_s, request.spec.arrival_order, request.id, limit, span_s),
        )


def _message(entry: Entry, has_run: bool) -> str:
    match entry.limit:
        case Limit.QUEUE:
            return f"the request waited for {entry.span_s:g} s, as long as --max-queue-s allows"
        case Limit.RUN:
            return f"the request ran for {entry.span_s:g} s, as long as --max-run-s allows"
        case Limit.OWN:
            missing = "ended" if has_run else "begun"
            return f"the request has not {missing} within its timeout of {entry.span_s:g} s"

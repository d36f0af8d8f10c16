"""The latest requests that were answered with an error, so that a question for the history of one
is answered with the reason, and with the time that it took. It does not know the reasons.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from weft.messages.control import TimePart
from weft.observe.request_context import RequestContext

MAX_REFUSALS = 256
WITHOUT_KEY = (401, 403)  # statuses of requests that anybody can send


class RefusedRequest(NamedTuple):
    rid: str
    path: str
    status: int
    message: str
    at_s: float  # by the clock of the log
    total_s: float
    times: tuple[TimePart, ...]  # all of `total_s`
    was_in_engine: bool  # which remembers it, too


class RefusalLog:
    """Belongs to one event loop. Requests without a key do not displace those with one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._latest: deque[RefusedRequest] = deque(maxlen=MAX_REFUSALS)
        self._without_key: deque[RefusedRequest] = deque(maxlen=MAX_REFUSALS)

    def note(self, request: RequestContext, path: str, status: int, message: str) -> None:
        now = self._clock()
        total_s = now - request.arrived_s
        spent = {**request.spent, "front": total_s - sum(request.spent.values())}
        times = tuple(
            TimePart(part=part, seconds=seconds) for part, seconds in spent.items() if seconds > 0
        )
        kept = self._without_key if status in WITHOUT_KEY else self._latest
        kept.append(
            RefusedRequest(
                request.rid, path, status, message, now, total_s, times, request.is_in_engine
            )
        )

    def of(self, rid: str, *, is_in_engine: bool) -> list[RefusedRequest]:
        """The refusals of requests with exactly this name, the latest first; without those that an
        engine remembers, too, if it remembers any of this name."""
        found = [one for one in self._all() if one.rid == rid]
        if is_in_engine:
            found = [one for one in found if not one.was_in_engine]
        return sorted(found, key=lambda one: -one.at_s)

    def ago_s(self, one: RefusedRequest) -> float:
        return self._clock() - one.at_s

    def _all(self) -> Iterator[RefusedRequest]:
        yield from self._latest
        yield from self._without_key

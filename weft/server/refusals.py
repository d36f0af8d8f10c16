"""The latest requests that were answered with an error before an engine had them, so that a
question for the history of one is answered with the reason. It does not know the reasons.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MAX_REFUSALS = 256


class RefusedRequest(NamedTuple):
    rid: str
    path: str
    status: int
    message: str
    at_s: float


class RefusalLog:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: deque[RefusedRequest] = deque(maxlen=MAX_REFUSALS)

    def note(self, rid: str, path: str, status: int, message: str) -> None:
        self._latest.append(RefusedRequest(rid, path, status, message, self._clock()))

    def describe(self, rid: str) -> str:
        """The latest refusal of a request with exactly this name in words; empty if none is
        remembered."""
        for one in reversed(self._latest):
            if one.rid == rid:
                ago_s = self._clock() - one.at_s
                return (
                    f"the request to {one.path} was answered with {one.status} {ago_s:.0f} s ago, "
                    f"and no engine has a history of it: {one.message}"
                )
        return ""

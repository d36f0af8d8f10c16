"""How fast the queue drains, and so when somebody whom it has refused should come again.

Measured by the admissions of the last half minute; the time is an argument, so that the same course
of things tells the same.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 30.0
MAX_ADMISSIONS = 1_024  # that are remembered: of a fast queue the latest tell enough
LEAST_S, MOST_S = 1, 60  # what is told


class Drain:
    def __init__(self) -> None:
        self._admitted: deque[float] = deque(
            maxlen=MAX_ADMISSIONS
        )  # when requests got a row for the first time
        self._has_begun = False

    def admitted(self, now: float) -> None:
        self._has_begun = True
        self._admitted.append(now)

    def retry_after_s(self, num_waiting: int, now: float) -> int:
        """Seconds after which those that wait now will have got a row, if it goes on as it does.

        At least a second, and at most a minute; so much, too, if nobody got a row for a while.
        Before the first one has there is nothing to go by: a second.
        """
        admitted = self._admitted
        while admitted and admitted[0] < now - WINDOW_S:
            admitted.popleft()
        if not admitted:
            return MOST_S if self._has_begun and num_waiting else LEAST_S
        rate = len(admitted) / max(now - admitted[0], 1.0)
        return min(max(math.ceil(num_waiting / rate), LEAST_S), MOST_S)

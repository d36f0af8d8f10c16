"""Gradual admission after a stop: requests go on in order of arrival, at a growing rate.

After the share s of the ramp, s^2 of the requests that waited when it began may go on, and
2s - s^2 of those that have come since. So the rate of the first grows evenly from 0, and that of
the others soon reaches the rate at which they come, and exceeds it by a third at most: what goes
on arriving is not put off to the end, when the server has most to do. None is left for the end,
when the input is simply open.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LATE_S = 0.001  # a wake-up comes so much later, so that rounding makes none come too early


class Ramp(NamedTuple):
    begin_s: float
    ramp_s: float
    first: int  # arrival order of the first blocked request
    num_blocked: int  # how many were blocked when it began

    def is_over(self, now: float) -> bool:
        return now >= self.begin_s + self.ramp_s

    def left_s(self, now: float) -> float:
        return max(self.begin_s + self.ramp_s - now, 0.0)

    def frontier(self, now: float, num_requests: int) -> int:
        """Arrival order of the first request that is still blocked; `num_requests` have arrived."""
        share = min(max(now - self.begin_s, 0.0) / self.ramp_s, 1.0)
        num_new = num_requests - self.first - self.num_blocked
        passed = self.num_blocked * share**2 + num_new * (2 * share - share**2)
        return self.first + math.floor(passed)

    def next_s(self, blocked_from: int, num_requests: int) -> float:
        """When the request `blocked_from` may go on, if no other arrives; else when all is over."""
        end_s = self.begin_s + self.ramp_s
        num_new = num_requests - self.first - self.num_blocked
        rank = blocked_from + 1 - self.first
        if rank > self.num_blocked + num_new:
            return end_s
        root = math.sqrt(num_new**2 + (self.num_blocked - num_new) * rank)
        return min(self.begin_s + self.ramp_s * rank / (num_new + root) + LATE_S, end_s)

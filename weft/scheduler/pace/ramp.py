"""Gradual admission after a stop: blocked requests go on in order of arrival, at a growing rate.

Of the requests that have arrived since the first blocked one, the share (t / ramp)^2 may go on
after t seconds. So the rate grows evenly from 0, requests that arrive meanwhile take their turn
behind, and none is left for the end, when the input is simply open.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LATE_S = 0.001  # a wake-up comes so much later, so that rounding makes none come too early


class Ramp(NamedTuple):
    begin_s: float
    ramp_s: float
    first: int  # arrival order of the first blocked request

    def is_over(self, now: float) -> bool:
        return now >= self.begin_s + self.ramp_s

    def left_s(self, now: float) -> float:
        return max(self.begin_s + self.ramp_s - now, 0.0)

    def frontier(self, now: float, num_requests: int) -> int:
        """Arrival order of the first request that is still blocked; `num_requests` have arrived."""
        share = min(max(now - self.begin_s, 0.0) / self.ramp_s, 1.0) ** 2
        return self.first + math.floor((num_requests - self.first) * share)

    def next_s(self, blocked_from: int, num_requests: int) -> float:
        """When the request `blocked_from` may go on, if no other arrives; else when all is over."""
        end_s = self.begin_s + self.ramp_s
        num = num_requests - self.first
        rank = blocked_from + 1 - self.first
        if rank > num:
            return end_s
        return min(self.begin_s + self.ramp_s * math.sqrt(rank / num) + LATE_S, end_s)

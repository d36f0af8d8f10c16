"""How long outputs become, from those that have ended: so long a request is expected to run.

An output that stops at an end-of-sequence token is as long as an earlier one, cut at its own limit;
one that ignores it goes to its limit. Lengths are tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate

MAX_LENGTHS = 256
MIN_LENGTHS = 8  # before that, a share of the limit is expected
FIRST_SHARE = 0.5


class OutputsSeen:
    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._sorted: list[int] = []  # [n]; empty: to be made anew
        self._sums: list[int] = []  # [n + 1] of those before each place

    def note(self, length: int) -> None:
        """An output has ended that might have stopped at any token."""
        self._lengths.append(length)
        self._sorted = []

    def left(
        self,
        num_generated: int,
        limit: int,
        *,
        stops: bool,
    ) -> float:
        """Tokens that an output is expected to get yet which has `num_generated` of at most
        `limit`; `stops`: it does not ignore the end-of-sequence token. At least 1."""
        most = max(limit - num_generated, 1)
        if not stops:
            return float(most)
        if len(self._lengths) < MIN_LENGTHS:
            return max(min(FIRST_SHARE * limit - num_generated, most), most / 2, 1.0)
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._sums = [0, *accumulate(self._sorted)]
        lengths = self._sorted
        first = bisect_right(lengths, num_generated)  # of those that became longer
        num_longer = len(lengths) - first
        if not num_longer:
            # It is longer than all others: half way through the rest.
            return max(most / 2, 1.0)
        cut = max(bisect_left(lengths, limit), first)  # of those that reach the limit
        total = self._sums[cut] - self._sums[first] + (len(lengths) - cut) * limit
        return min(max(total / num_longer - num_generated, 1.0), float(most))

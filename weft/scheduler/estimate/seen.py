"""What is expected from what has ended: the lengths of outputs, and the times of compilations.

An output that may stop at an end-of-sequence token is expected to be as long as an earlier output,
cut at its own limit; an output that ignores this token reaches its limit. Lengths are in tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate

MAX_LENGTHS = 256
MIN_LENGTHS = 8  # with fewer outputs, a fraction of the limit is expected
FIRST_SHARE = 0.5
MAX_TIMES = 64


class OutputsSeen:
    """The lengths of ended outputs."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._sorted: list[int] = []  # [n]; empty: must be sorted again
        self._sums: list[int] = []  # [n + 1] sums of the lengths before each index

    def note(self, length: int) -> None:
        """Note the length of an ended output that might have stopped at any token."""
        self._lengths.append(length)
        self._sorted = []

    def left(
        self,
        num_generated: int,
        limit: int,
        *,
        stops: bool,
    ) -> float:
        """Tokens that an output is still expected to get after `num_generated` of at most `limit`.
        `stops`: it does not ignore the end-of-sequence token. At least 1."""
        most = max(limit - num_generated, 1)
        if not stops:
            return float(most)
        if len(self._lengths) < MIN_LENGTHS:
            return max(min(FIRST_SHARE * limit - num_generated, most), most / 2, 1.0)
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._sums = [0, *accumulate(self._sorted)]
        lengths = self._sorted
        first = bisect_right(lengths, num_generated)  # index of the first longer output
        num_longer = len(lengths) - first
        if not num_longer:
            # It is longer than all others, so half of the rest is expected.
            return max(most / 2, 1.0)
        cut = max(bisect_left(lengths, limit), first)  # index of the first that reaches the limit
        total = self._sums[cut] - self._sums[first] + (len(lengths) - cut) * limit
        return min(max(total / num_longer - num_generated, 1.0), float(most))


class CompilesSeen:
    """The times that ended compilations of grammars took."""

    def __init__(self) -> None:
        # Seconds from a request's arrival until its grammar was compiled, without those from a
        # cache.
        self._times: deque[float] = deque(maxlen=MAX_TIMES)

    def note(self, seconds: float) -> None:
        """A request has waited so long for a compilation."""
        self._times.append(seconds)

    def left_s(self, waited_s: float) -> float | None:
        """Seconds that a request that has waited `waited_s` is expected to wait still. None if no
        compilation has ended yet."""
        if not self._times:
            return None
        longer = [one for one in self._times if one > waited_s]
        if not longer:
            # It takes longer than all others: as long again.
            return waited_s
        return sum(longer) / len(longer) - waited_s

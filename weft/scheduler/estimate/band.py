"""The errors of past estimates of a time, and from them a band for the next one.

The bounds are quantiles of the latest ratios of actual to expected times, moved by a margin on each
side, because errors come in series and are known only after the times have passed. A time outside
of the band widens the margin of its side, and each time inside narrows both margins by a nineteenth
of that. So in the long run one in twenty times is outside on each side, whatever the errors are.
Source: Angelopoulos, Candès and Tibshirani, Conformal PID Control, arXiv:2307.16895 (its quantile
tracking).
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

COVERED = 0.9
MAX_RATIOS = 256
MIN_RATIOS = 16  # with fewer ratios, the errors are unknown
FIRST_FACTOR = 4.0  # half-width of the band in that case
FIRST_MARGIN = math.log(1.2)  # initial widening of the band on each side
LEAST_MARGIN, MOST_MARGIN = -0.5, 1.5
MARGIN_STEP = 0.03  # for a time outside of the band
OUTSIDE = (1 - COVERED) / 2  # fraction of times outside on each side
LEAST_S = 1e-3  # shorter times count as this


class WaitBand(NamedTuple):
    """Seconds until the first token: nine of ten times are between the outer two."""

    low_s: float
    likely_s: float
    high_s: float


class TrackedMargin:
    """How far a bound is moved outwards, as a logarithm."""

    def __init__(self) -> None:
        self.width = FIRST_MARGIN

    def learn(self, *, is_outside: bool) -> None:
        missed = 1.0 if is_outside else 0.0
        width = self.width + MARGIN_STEP * (missed - OUTSIDE)
        self.width = min(max(width, LEAST_MARGIN), MOST_MARGIN)


class Calibration:
    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)  # logarithms
        self._below = TrackedMargin()
        self._above = TrackedMargin()
        self.num_seen = 0
        self.num_within = 0

    def band(self, expected_s: float) -> WaitBand:
        """The band around an estimate."""
        if len(self._ratios) < MIN_RATIOS:
            low_s = expected_s / FIRST_FACTOR
            high_s = expected_s * FIRST_FACTOR
            return WaitBand(low_s, expected_s, high_s)
        quantiles = (OUTSIDE, 0.5, 1 - OUTSIDE)
        low, middle, high = np.quantile(np.array(self._ratios), quantiles).tolist()
        # A margin below 0 moves no bound past the median.
        low = min(low - self._below.width, middle)
        high = max(high + self._above.width, middle)
        base_s = max(expected_s, LEAST_S)
        return WaitBand(
            base_s * math.exp(low),
            base_s * math.exp(middle),
            base_s * math.exp(high),
        )

    def learn(
        self,
        expected_s: float,
        band: WaitBand,
        actual_s: float,
    ) -> None:
        """Learn from a time that has passed and that was expected, with this band."""
        is_below = actual_s < band.low_s
        is_above = actual_s > band.high_s
        self.num_seen += 1
        self.num_within += not (is_below or is_above)
        self._below.learn(is_outside=is_below)
        self._above.learn(is_outside=is_above)
        ratio = max(actual_s, LEAST_S) / max(expected_s, LEAST_S)
        self._ratios.append(math.log(ratio))

"""How far estimates of a time have been off, and so between which bounds the next one lies.

The bounds are quantiles of the latest ratios of what came to what was expected, moved by a margin
on each side: errors come in runs, and are known only when the times have passed. A time outside
moves the margin of its side out, each within moves both in by a nineteenth of that, so one in
twenty is outside on either side in the long run, whatever the errors are.
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
MIN_RATIOS = 16  # before that, nothing is known of the errors
FIRST_FACTOR = 4.0  # the band then
FIRST_MARGIN = math.log(1.2)  # by which the band is wider on each side
LEAST_MARGIN, MOST_MARGIN = -0.5, 1.5
MARGIN_STEP = 0.03  # of a time outside
OUTSIDE = (1 - COVERED) / 2  # part of the times on each side
LEAST_S = 1e-3  # times below it are equal


class WaitBand(NamedTuple):
    """Seconds until the first token: nine of ten times lie between the outer two."""

    low_s: float
    likely_s: float
    high_s: float


class TrackedMargin:
    """How far a bound is moved out, in logarithms."""

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
        # A margin below 0 moves no bound over the middle.
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
        """A time that was expected, with this band around it, has come."""
        is_below = actual_s < band.low_s
        is_above = actual_s > band.high_s
        self.num_seen += 1
        self.num_within += not (is_below or is_above)
        self._below.learn(is_outside=is_below)
        self._above.learn(is_outside=is_above)
        ratio = max(actual_s, LEAST_S) / max(expected_s, LEAST_S)
        self._ratios.append(math.log(ratio))

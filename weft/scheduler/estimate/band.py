"""How far estimates of a time have been off, and so between which bounds the next one lies.

The bounds are quantiles of the latest ratios of what came to what was expected, a little wider:
errors come in runs, and are known only when the times have passed. How far out the quantiles are
is corrected by how often they were missed, within limits, so that they do not swing.
Source: Gibbs and Candès, Adaptive Conformal Inference Under Distribution Shift, arXiv:2106.00170.
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
MARGIN = math.log(1.2)  # by which the band is wider on each side
STEP = 0.005  # by which a hit or a miss moves the quantiles
LEAST_OUTSIDE = 0.01  # part of the ratios that is left out of the band
MOST_OUTSIDE = 0.3
LEAST_S = 1e-3  # times below it are equal


class WaitBand(NamedTuple):
    """Seconds until the first token: nine of ten times lie between the outer two."""

    low_s: float
    likely_s: float
    high_s: float


class Calibration:
    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)  # logarithms
        self._outside = 1 - COVERED
        self.num_seen = 0
        self.num_within = 0

    def band(self, expected_s: float) -> WaitBand:
        """The band around an estimate."""
        if len(self._ratios) < MIN_RATIOS:
            low_s = expected_s / FIRST_FACTOR
            high_s = expected_s * FIRST_FACTOR
            return WaitBand(low_s, expected_s, high_s)
        quantiles = (self._outside / 2, 0.5, 1 - self._outside / 2)
        low, middle, high = np.quantile(np.array(self._ratios), quantiles).tolist()
        base_s = max(expected_s, LEAST_S)
        return WaitBand(
            base_s * math.exp(low - MARGIN),
            base_s * math.exp(middle),
            base_s * math.exp(high + MARGIN),
        )

    def learn(
        self,
        expected_s: float,
        band: WaitBand,
        actual_s: float,
    ) -> None:
        """A time that was expected, with this band around it, has come."""
        is_within = band.low_s <= actual_s <= band.high_s
        self.num_seen += 1
        self.num_within += is_within
        missed = 0.0 if is_within else 1.0
        outside = self._outside + STEP * (1 - COVERED - missed)
        self._outside = min(max(outside, LEAST_OUTSIDE), MOST_OUTSIDE)
        ratio = max(actual_s, LEAST_S) / max(expected_s, LEAST_S)
        self._ratios.append(math.log(ratio))

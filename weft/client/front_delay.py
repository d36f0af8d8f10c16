"""The time that the front adds to a first token: it reads the request, tokenizes the prompt, and
exchanges messages with the engine.

The engine estimates the wait of a request from its arrival there. The client gets this estimate
plus the front's part, between the same quantiles: of the latest requests with a deadline, one in
twenty took less and one in twenty more.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

MAX_DELAYS = 128
REFRESH = 16  # new delays until the quantiles are computed again
OUTSIDE = 0.05  # share of delays below the low quantile, and above the high one


class FrontDelay:
    def __init__(self) -> None:
        self._delays_s: deque[float] = deque(maxlen=MAX_DELAYS)
        self._num_new = 0
        self._low_s = 0.0
        self._high_s = 0.0

    def learn(self, seconds: float) -> None:
        """Record the front's part in the time of a first token."""
        self._delays_s.append(seconds)
        self._num_new += 1
        if self._num_new >= REFRESH:
            self._num_new = 0
            delays = np.array(self._delays_s)
            low_s, high_s = np.quantile(delays, (OUTSIDE, 1 - OUTSIDE)).tolist()
            self._low_s = low_s
            self._high_s = high_s

    def added_to(self, text: str) -> str:
        """The text of the header, LOW-HIGH in ms: `text` counts from the arrival in the engine, the
        result from the arrival of the HTTP request."""
        low_ms, _, high_ms = text.partition("-")
        low = math.floor(int(low_ms) + 1_000 * self._low_s)
        high = math.ceil(int(high_ms) + 1_000 * self._high_s)
        return f"{low}-{high}"

"""The times between tokens as a histogram with logarithmic bins, because a long simulation has
hundreds of millions of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DoubleArray = NDArray[np.float64]

SHORTEST_S = 1e-7
BINS_PER_E = 100  # bins are 1 % wide, which is the precision of the percentiles
NUM_BINS = 2_600  # up to 2e4 s
FLUSH_LEN = 1 << 18


class Gaps:
    """Times between tokens, counted by length: bin i has those of about SHORTEST_S * e^(i /
    BINS_PER_E) seconds."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._pending: list[DoubleArray] = []
        self._num_pending = 0

    def add(self, gaps: DoubleArray) -> None:
        """Add times [n] in seconds; NaN (the first token of a request) does not count."""
        self._pending.append(gaps)
        self._num_pending += len(gaps)
        if self._num_pending >= FLUSH_LEN:
            self._flush()

    def percentile(self, percent: float) -> float:
        """This percentile, in seconds; NaN if there are no gaps."""
        self._flush()
        total = np.cumsum(self._counts)
        if not total[-1]:
            return float("nan")
        wanted = percent / 100 * total[-1]
        found = int(np.searchsorted(total, wanted))
        # The middle of the bin.
        ratio = np.exp((found + 0.5) / BINS_PER_E)
        return SHORTEST_S * float(ratio)

    def _flush(self) -> None:
        if not self._pending:
            return
        gaps = np.concatenate(self._pending)
        gaps = gaps[~np.isnan(gaps)]
        gaps = np.maximum(gaps, SHORTEST_S)
        places = np.log(gaps / SHORTEST_S) * BINS_PER_E
        bins = places.astype(np.int64)
        bins = np.minimum(bins, NUM_BINS - 1)
        self._counts += np.bincount(bins, minlength=NUM_BINS)
        self._pending = []
        self._num_pending = 0

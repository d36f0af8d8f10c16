"""Guesses the full length of an output that was cut off, from the outputs that ended."""

from __future__ import annotations

import numpy as np

from weft.arrays import LongArray


class OutputLengths:
    """The lengths of outputs that ended by themselves, per tenant, in tokens."""

    def __init__(self) -> None:
        self._noted: dict[str, list[int]] = {}
        self._all: list[int] = []
        # By tenant (None: all tenants): sorted lengths, and the sum from each index to the end.
        self._sorted: dict[str | None, tuple[LongArray, LongArray]] = {}

    def note(self, tenant: str, length: int) -> None:
        self._sorted.clear()
        self._noted.setdefault(tenant, []).append(length)
        self._all.append(length)

    def guess(self, tenant: str, *, beyond: int, bound: int) -> int:
        """The mean length of the tenant's outputs that are longer than `beyond` tokens; if there
        are none, that of all tenants; else `bound`. Never more than `bound`."""
        for whose in (tenant, None):
            lengths, sums = self._of(whose)
            first = int(np.searchsorted(lengths, beyond, side="right"))
            if first < len(lengths):
                mean = sums[first] / (len(lengths) - first)
                return min(round(float(mean)), bound)
        return bound

    def _of(self, whose: str | None) -> tuple[LongArray, LongArray]:
        found = self._sorted.get(whose)
        if found is None:
            noted = self._all if whose is None else self._noted.get(whose, [])
            lengths = np.sort(np.array(noted, dtype=np.int64))
            found = (lengths, np.cumsum(lengths[::-1])[::-1])
            self._sorted[whose] = found
        return found

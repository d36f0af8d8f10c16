"""Which slot holds each token of each running request (SGLang: ReqToTokenPool).

The runner keeps a copy of this table on its device and follows it from the plans. What a plan does
not say by itself (a cached prefix, duplicates re-pointed to the tree's pages) is logged here until
the next plan takes it along.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray

Write = tuple[int, int, IntArray]  # row, first position, slots


class RowTable:
    """Slots by row and position, and the rows that are free.

    `limit` rows may be in use. It may be changed; rows in use above it are used to their end.
    """

    def __init__(self, num_rows: int, max_len: int, limit: int | None = None) -> None:
        self.num_rows = num_rows
        self.limit = num_rows if limit is None else limit
        self.max_len = max_len
        self.slots: IntArray = np.zeros((num_rows, max_len), dtype=np.int32)  # [row, position]
        self.reset()

    def reset(self) -> None:
        """Free every row, whatever its owner, and drop the log for the runner."""
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._writes: list[Write] = []

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    @property
    def num_free(self) -> int:
        """Rows that may be taken now."""
        return max(self.limit - self.num_used, 0)

    def alloc(self) -> int:
        """Take a row. The caller has looked at `num_free`."""
        return self._free.pop()

    def free(self, row: int) -> None:
        assert row not in self._free, "a row was freed twice"
        self._free.append(row)

    def point(self, row: int, start: int, slots: IntArray) -> None:
        """Put `slots` [n] into a row from position `start` on, and log that for the next plan."""
        self.slots[row, start : start + len(slots)] = slots
        self._writes.append((row, start, slots))

    def take_writes(self) -> list[Write]:
        """The writes of `point` since the last call, in order."""
        writes = self._writes
        self._writes = []
        return writes

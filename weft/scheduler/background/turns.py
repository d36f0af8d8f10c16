"""Background rows that rest while online requests decode.

A step of online rows may take `max_slowdown` times as long for the background rows that join it. By
the cost model of steps, the first so many of them take part, in the order in which they began to
decode: the oldest end first, and release their memory. The others keep their rows and their KV, and
go on in a step with more time. Without online rows all of them take part.

    online | background .......... | resting ...
    |<- 1 ->|<- max_slowdown - 1 ->|
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.batch import NO_ROWS
from weft.scheduler.pace.pace import Pace
from weft.scheduler.request import Columns


class BackgroundTurns:
    """`pace` knows the cost of steps; None, or while it does not know it: no background row runs
    beside online rows."""

    def __init__(self, pace: Pace | None, max_slowdown: float) -> None:
        self._pace = pace
        self._max_slowdown = max_slowdown
        # The last answer: the same rows get the same array, of which facts are already known.
        self._asked: IntArray = NO_ROWS
        self._num_resting = 0
        self._answer: IntArray = NO_ROWS

    def take(self, columns: Columns, rows: IntArray) -> IntArray:
        is_background = columns.background.take(rows)
        candidates = rows[is_background]
        if not len(candidates) or len(candidates) == len(rows):
            return rows
        num_taken = self._num_in_time(columns, rows[~is_background], candidates)
        num_resting = len(candidates) - num_taken
        if not num_resting:
            return rows
        if rows is not self._asked or num_resting != self._num_resting:
            takes_part = ~is_background
            takes_part[np.flatnonzero(is_background)[:num_taken]] = True
            self._asked = rows
            self._num_resting = num_resting
            self._answer = rows[takes_part]
        return self._answer

    def _num_in_time(self, columns: Columns, online: IntArray, candidates: IntArray) -> int:
        """How many of the background rows `candidates` [n] may join a step of the rows `online`."""
        if self._pace is None:
            return 0
        cost = self._pace.model()
        if cost is None:
            return 0
        online_s = cost.seconds(self._pace.load_of(online))
        seq_len = columns.seq_len.take(candidates).astype(np.int64)
        lens = seq_len - columns.kv_len.take(candidates)
        # Sums of integers are the same on every machine.
        num_tokens = np.cumsum(lens)
        num_pairs = np.cumsum(lens * seq_len)
        seconds = cost.token_s * num_tokens + cost.pair_s * num_pairs
        spare_s = (self._max_slowdown - 1) * online_s
        return int(np.searchsorted(seconds, spare_s, side="right"))

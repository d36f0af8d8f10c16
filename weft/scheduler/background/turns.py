"""Background rows that rest while online requests run.

A step of online requests may be as long as `room.py` says. By the cost model of steps, the first so
many background rows take part, in the order in which they began to decode: the oldest end first,
and release their memory. The others keep their rows and their KV, and go on in a step with more
time. Without online requests all of them take part. While fewer rows are there than fill such a
step, prompts of background requests go before them (`Pace._reserve`).

    prompts | online | background .......... | resting ...
    |<------------- bound ------------------>|
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.scheduler.batch import NO_ROWS
from weft.scheduler.pace.pace import Pace
from weft.scheduler.request import Columns, Request


class BackgroundTurns:
    """`pace` knows the cost of steps; None, or while it does not know it: no background row runs
    beside online requests."""

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        # The last answer: the same rows get the same array, of which facts are already known.
        self._asked: IntArray = NO_ROWS
        self._num_resting = 0
        self._answer: IntArray = NO_ROWS

    def take(self, columns: Columns, rows: IntArray) -> IntArray:
        is_background = columns.background.take(rows)
        if not is_background.any() or is_background.all():
            return rows
        return self._first_in_time(columns, rows, is_background, ())

    def beside(self, columns: Columns, rows: IntArray, prompts: Sequence[Request]) -> IntArray:
        """Those of `rows` [n] that take part in a step with these pieces of prompts, which are of
        one class."""
        is_background = columns.background.take(rows)
        if not is_background.any():
            return rows
        if is_background.all() and prompts[0].spec.service.yields:
            return rows
        return self._first_in_time(columns, rows, is_background, prompts)

    def _first_in_time(
        self,
        columns: Columns,
        rows: IntArray,
        is_background: BoolArray,
        prompts: Sequence[Request],
    ) -> IntArray:
        """The online rows, and the first background rows that the step has time for."""
        candidates = rows[is_background]
        num_taken = 0
        if self._pace is not None:
            spare_s = self._pace.left_of_online(rows[~is_background], prompts)
            num_taken = self._num_within(columns, candidates, spare_s)
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

    def _num_within(self, columns: Columns, candidates: IntArray, seconds: float) -> int:
        """How many of the rows `candidates` [n] may join for `seconds` more."""
        assert self._pace is not None
        cost = self._pace.model()
        if cost is None:
            return 0
        seq_len = columns.seq_len.take(candidates).astype(np.int64)
        lens = seq_len - columns.kv_len.take(candidates)
        # Sums of integers are the same on every machine.
        num_tokens = np.cumsum(lens)
        num_pairs = np.cumsum(lens * seq_len)
        needed_s = cost.token_s * num_tokens + cost.pair_s * num_pairs
        return int(np.searchsorted(needed_s, seconds, side="right"))

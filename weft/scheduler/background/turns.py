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
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.scheduler.batch import NO_ROWS
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.request import Columns, Request


class SpareTime(NamedTuple):
    """What a step of online requests has left for others."""

    seconds: float
    cost: CostModel

    def without_drafts(self, columns: Columns, rows: IntArray, counts: IntArray) -> SpareTime:
        """The time that is left beside so many drafts of each row."""
        draft_s = self.cost.token_s + self.cost.pair_s * columns.seq_len.take(rows)
        needed_s = np.cumsum(draft_s * counts)
        left_s = self.seconds - float(needed_s[-1])
        return self._replace(seconds=left_s)

    def num_rows(self, columns: Columns, rows: IntArray, num_drafts: IntArray | int = 0) -> int:
        """How many of `rows` [n], the first ones, have time for their next step, with so many
        drafts of each."""
        seq_len = columns.seq_len.take(rows).astype(np.int64)
        computed = np.minimum(columns.kv_len.take(rows), columns.known_len.take(rows))
        lens = seq_len - computed + num_drafts
        # Sums of integers are the same on every machine.
        num_tokens = np.cumsum(lens)
        num_pairs = np.cumsum(lens * seq_len)
        needed_s = self.cost.token_s * num_tokens + self.cost.pair_s * num_pairs
        return int(np.searchsorted(needed_s, self.seconds, side="right"))


class BackgroundTurns:
    """`pace` knows the cost of steps; while it does not know it, no background row runs beside
    online requests."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # The last answer: the same rows get the same array, of which facts are already known.
        self._asked: IntArray = NO_ROWS
        self._num_resting = 0
        self._answer: IntArray = NO_ROWS
        self._spare: SpareTime | None = None  # of a step that was asked for last; None: unknown

    def take(self, columns: Columns, rows: IntArray) -> IntArray:
        self._spare = None
        is_background = columns.background.take(rows)
        if not is_background.any() or is_background.all():
            return rows
        return self._first_in_time(columns, rows, is_background, ())

    def beside(self, columns: Columns, rows: IntArray, prompts: Sequence[Request]) -> IntArray:
        """Those of `rows` [n] that take part in a step with these pieces of prompts, which are of
        one class."""
        self._spare = None
        is_background = columns.background.take(rows)
        if not is_background.any():
            return rows
        if is_background.all() and prompts[0].spec.service.yields:
            return rows
        return self._first_in_time(columns, rows, is_background, prompts)

    def beside_drafts(
        self, columns: Columns, rows: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Background rows take the time that drafts of online requests leave, each with its
        drafts. After the first that does not fit, rows go on without theirs."""
        spare = self._spare
        if spare is None:
            return rows, counts
        is_background = columns.background.take(rows)
        spare = spare.without_drafts(columns, rows, np.where(is_background, 0, counts))
        background = rows[is_background]
        num_drafts = counts[is_background]
        num_drafts[spare.num_rows(columns, background, num_drafts) :] = 0
        counts[is_background] = num_drafts
        num_rows = spare.num_rows(columns, background, num_drafts)
        if num_rows == len(background):
            return rows, counts
        takes_part = _with_first(is_background, num_rows)
        return rows[takes_part], counts[takes_part]

    def _spare_time(self, online: IntArray, prompts: Sequence[Request]) -> SpareTime | None:
        cost = self._pace.model()
        if cost is None:
            return None
        return SpareTime(self._pace.left_of_online(online, prompts), cost)

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
        self._spare = self._spare_time(rows[~is_background], prompts)
        if self._spare is not None:
            num_taken = self._spare.num_rows(columns, candidates)
        num_resting = len(candidates) - num_taken
        if not num_resting:
            return rows
        if rows is not self._asked or num_resting != self._num_resting:
            self._asked = rows
            self._num_resting = num_resting
            self._answer = rows[_with_first(is_background, num_taken)]
        return self._answer


def _with_first(is_background: BoolArray, num: int) -> BoolArray:
    """[n] Which rows take part: online rows, and the first `num` background rows."""
    takes_part = ~is_background
    takes_part[np.flatnonzero(is_background)[:num]] = True
    return takes_part

"""Highest response ratio next: (time waited + work) / work.

The work of a request is the number of tokens to compute.
"""

from __future__ import annotations

from weft.arrays import LongArray
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class ResponseRatio(KeyPolicy):
    reads_cache = True

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> DoubleArray:
        fill_len = table.fill_len.take(indices)
        cached_len = table.cached_len.take(indices)
        work = fill_len - cached_len
        # The lowest key goes first, so it is the negative of the time waited; the 1 that the
        # ratio adds does not change the order.
        minus_waited_s = table.arrival_s.take(indices) - now
        return minus_waited_s / work


POLICY = ResponseRatio

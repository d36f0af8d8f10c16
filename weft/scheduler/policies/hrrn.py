"""Highest response ratio next: (time waited + work) / work.

The work of a request is the number of tokens to compute.
"""

from __future__ import annotations

from weft.arrays import IntArray
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class ResponseRatio(KeyPolicy):
    reads_cache = True

    def key(self, table: WaitingTable, indices: IntArray, now: float) -> DoubleArray:
        work = table.fill_len[indices] - table.cached_len[indices]
        return (table.arrival_s[indices] - now) / work


POLICY = ResponseRatio

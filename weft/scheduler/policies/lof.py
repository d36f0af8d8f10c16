"""Longest output first, by what the request allows: so no long output runs alone at a job's end."""

from __future__ import annotations

from weft.arrays import IntArray, LongArray
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class LongestOutput(KeyPolicy):
    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        return table.fill_len[indices] - table.max_len[indices]


POLICY = LongestOutput

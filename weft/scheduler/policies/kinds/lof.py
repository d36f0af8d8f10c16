"""Longest output first, by the limit of each request: no long output runs alone at a job's end."""

from __future__ import annotations

from weft.arrays import LongArray
from weft.scheduler.policies.protocol import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class LongestOutput(KeyPolicy):
    lasts = True

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        # The negative of the output length: the lowest key goes first.
        fill_len = table.fill_len.take(indices)
        max_len = table.max_len.take(indices)
        return fill_len - max_len


POLICY = LongestOutput

"""Fewest tokens to compute first: the shortest mean wait for a first token."""

from __future__ import annotations

from weft.arrays import LongArray
from weft.scheduler.policies.protocol import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class ShortestPrefill(KeyPolicy):
    reads_cache = True
    lasts = True

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        fill_len = table.fill_len.take(indices)
        cached_len = table.cached_len.take(indices)
        return fill_len - cached_len


POLICY = ShortestPrefill

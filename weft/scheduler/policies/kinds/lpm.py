"""Longest prefix match first, so that the cache is used before its pages are evicted."""

from __future__ import annotations

from weft.arrays import LongArray
from weft.scheduler.policies.protocol import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class LongestPrefix(KeyPolicy):
    reads_cache = True
    lasts = True

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        cached_len = table.cached_len.take(indices)
        return -cached_len


POLICY = LongestPrefix

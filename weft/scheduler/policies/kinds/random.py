"""A random order that depends only on the seed and on the arrival orders."""

from __future__ import annotations

import numpy as np

from weft.arrays import GOLDEN_GAMMA, LongArray, splitmix64
from weft.scheduler.policies.protocol import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class Random(KeyPolicy):
    lasts = True

    def key(self, table: WaitingTable, indices: LongArray, now: float) -> LongArray:
        # The seed is the upper half and the arrival order the lower: equal sums need equal seeds.
        seed = self.context.settings.seed % 2**32
        upper_half = np.uint64(seed << 32)
        arrivals = table.arrival_order.take(indices)
        numbers = arrivals.astype(np.uint64) + upper_half
        hashes = splitmix64(numbers * GOLDEN_GAMMA)
        return hashes.view(np.int64)


POLICY = Random

"""An order that depends on the seed and on the numbers of arrival, and on nothing else."""

from __future__ import annotations

import numpy as np

from weft.arrays import GOLDEN_GAMMA, IntArray, LongArray, splitmix64
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import WaitingTable


class Random(KeyPolicy):
    def key(self, table: WaitingTable, indices: IntArray, now: float) -> LongArray:
        seed = np.uint64(self.context.settings.seed % 2**32 << 32)
        numbers = table.arrival_order[indices].astype(np.uint64) + seed
        return splitmix64(numbers * GOLDEN_GAMMA).view(np.int64)


POLICY = Random

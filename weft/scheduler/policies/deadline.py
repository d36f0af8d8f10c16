"""Earliest deadline first, of those that can still be met.

A request's deadline is that of its first token (`ttft_ms`), or else of its end (`timeout_ms`).
Whoever cannot make it any more, by what prompts have cost so far, goes behind, with those that have
no deadline: serving it first would make others late, too.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import LongArray
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class EarliestDeadline(KeyPolicy):
    reads_cache = True

    def key(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> DoubleArray:
        due_s = table.due_s.take(indices)
        num_tokens = table.fill_len.take(indices) - table.cached_len.take(indices)
        done_s = now + self._token_s() * num_tokens
        key: DoubleArray = np.where(done_s <= due_s, due_s, np.inf)
        return key

    def _token_s(self) -> float:
        """Seconds that a token of a prompt takes; 0 as long as nothing is known."""
        pace = self.context.pace
        cost = None if pace is None else pace.model()
        return 0.0 if cost is None else cost.token_s


POLICY = EarliestDeadline

"""Earliest deadline first, of those that can still be met.

A request's deadline is that of its first token (`ttft_ms`), or else of its end (`timeout_ms`).
Whoever cannot make it any more, by what prompts have cost so far, goes behind, with those that have
no deadline: serving it first would make others late, too.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.policy import KeyPolicy
from weft.scheduler.waiting_table import DoubleArray, WaitingTable


class EarliestDeadline(KeyPolicy):
    reads_cache = True

    def key(
        self,
        table: WaitingTable,
        indices: IntArray,
        now: float,
    ) -> DoubleArray:
        ttft_ms = table.ttft_ms[indices]
        timeout_ms = table.timeout_ms[indices]
        allowed_ms = np.where(ttft_ms > 0, ttft_ms, timeout_ms)
        due_s = table.arrival_s[indices] + allowed_ms / 1_000
        num_tokens = table.fill_len[indices] - table.cached_len[indices]
        done_s = now + self._token_s() * num_tokens
        can_be_met = (allowed_ms > 0) & (done_s <= due_s)
        key: DoubleArray = np.where(can_be_met, due_s, np.inf)
        return key

    def _token_s(self) -> float:
        """Seconds that a token of a prompt takes; 0 as long as nothing is known."""
        pace = self.context.pace
        cost = None if pace is None else pace.model()
        return 0.0 if cost is None else cost.token_s


POLICY = EarliestDeadline

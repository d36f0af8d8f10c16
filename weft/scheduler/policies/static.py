"""Static batching: no request joins a batch that decodes; all wait for its slowest. A baseline."""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import IntArray
from weft.scheduler.policy import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class Static(Policy):
    ages = False

    def order(self, table: WaitingTable, indices: IntArray, now: float) -> Iterator[Request]:
        columns = self.context.columns
        rows = self.context.running.rows
        if (columns.kv_len[rows] > columns.prompt_len[rows]).any():
            return iter(())
        return super().order(table, indices, now)


POLICY = Static

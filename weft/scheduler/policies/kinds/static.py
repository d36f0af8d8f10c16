"""Static batching: no request joins a batch that decodes; all wait for the slowest. A baseline."""

from __future__ import annotations

from collections.abc import Iterator

from weft.arrays import LongArray
from weft.scheduler.policies.protocol import Policy
from weft.scheduler.request import Request
from weft.scheduler.waiting_table import WaitingTable


class Static(Policy):
    ages = False

    def order(
        self,
        table: WaitingTable,
        indices: LongArray,
        now: float,
    ) -> Iterator[Request]:
        columns = self.context.columns
        rows = self.context.running.rows
        kv_len = columns.kv_len[rows]
        prompt_len = columns.prompt_len[rows]
        # A row with more KV than its prompt decodes, so its batch is closed.
        is_decoding = kv_len > prompt_len
        if is_decoding.any():
            return iter(())
        return super().order(table, indices, now)


POLICY = Static

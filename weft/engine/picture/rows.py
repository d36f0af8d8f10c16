"""The requests with a row, for a picture.

Values that do not change while a request has its row are read once; the others come from the
scheduler's columns in a few vector operations, whatever the number of rows.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.engine.picture.causes import RowCauses
from weft.messages.picture import RowColumns
from weft.scheduler.scheduler import Scheduler


class RowWatch:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._causes = RowCauses(scheduler)
        columns = scheduler.kv.columns
        num_rows = len(columns.known_len)
        self._is_taken: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._epoch: IntArray = columns.epoch.copy()  # of each row when its request was read
        # By row, values that do not change:
        self._rids: list[str] = [""] * num_rows
        self._tenants: list[str] = [""] * num_rows
        self._services: list[str] = [""] * num_rows
        self._arrived_s = np.zeros(num_rows, dtype=np.float64)
        self._order = np.zeros(num_rows, dtype=np.int64)
        self._cached_len = np.zeros(num_rows, dtype=np.int32)
        self._fill_len = np.zeros(num_rows, dtype=np.int32)
        self._max_len = np.zeros(num_rows, dtype=np.int32)
        # The used rows in order of arrival, with names, tenants and classes of their requests:
        self._rows: IntArray = np.empty(0, dtype=np.int32)  # [R]
        self._shown_rids: list[str] = []  # [R]
        self._shown_tenants: list[str] = []  # [R]

    def columns(self, now: float) -> RowColumns:
        columns = self._scheduler.kv.columns
        self._look()
        self._causes.look()
        rows = self._rows
        prompt_len = columns.prompt_len.take(rows)
        known_len = columns.known_len.take(rows)
        kv_len = columns.kv_len.take(rows)
        num_output = known_len - prompt_len
        # A retracted request has output, but computes the tokens before it again.
        is_decoding = (num_output > 0) & (kv_len >= known_len - 1)
        age_s = (now - self._arrived_s.take(rows)).astype(np.float32)
        return RowColumns(
            rids=self._shown_rids,
            tenants=self._shown_tenants,
            services=[self._services[row] for row in rows.tolist()],
            is_decoding=is_decoding.astype(np.int32).tobytes(),
            prompt_len=prompt_len.tobytes(),
            cached_len=self._cached_len.take(rows).tobytes(),
            kv_len=kv_len.tobytes(),
            fill_len=self._fill_len.take(rows).tobytes(),
            num_output=num_output.tobytes(),
            max_len=self._max_len.take(rows).tobytes(),
            age_s=age_s.tobytes(),
            causes=[self._causes.names[row] for row in rows.tolist()],
            missed_len=self._causes.missed_len.take(rows).tobytes(),
        )

    def _look(self) -> None:
        """Read the requests of rows that have changed since the last look."""
        columns = self._scheduler.kv.columns
        is_taken = columns.known_len > 0
        is_other = (columns.epoch != self._epoch) | (is_taken != self._is_taken)
        if not is_other.any():
            return
        self._is_taken = is_taken
        self._epoch = columns.epoch.copy()
        for row in np.flatnonzero(is_other & is_taken).tolist():
            self._read(row)
        rows = np.flatnonzero(is_taken).astype(np.int32)
        self._rows = rows[np.argsort(self._order.take(rows))]
        shown = self._rows.tolist()
        self._shown_rids = [self._rids[row] for row in shown]
        self._shown_tenants = [self._tenants[row] for row in shown]

    def _read(self, row: int) -> None:
        request = self._scheduler.kv.columns.requests[row]
        self._rids[row] = request.message.rid
        self._tenants[row] = request.message.tenant
        self._services[row] = request.spec.service.name
        self._arrived_s[row] = request.spec.arrival_s
        self._order[row] = request.spec.arrival_order
        self._cached_len[row] = request.cached_tokens
        self._fill_len[row] = request.fill_len
        self._max_len[row] = request.max_len
        self._causes.forget(row)

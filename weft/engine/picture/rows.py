"""The requests that have a row, for a picture.

What a request keeps while it has its row is read once; the rest comes from the scheduler's columns
in a few vector operations, however many rows there are.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.engine.picture.columns import ints
from weft.messages.picture import RowColumns
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler


class RowWatch:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owners = b""  # of the rows: the same as long as no row changes hands
        self._rows: IntArray = np.empty(0, dtype=np.int32)  # [R], by the arrival of their requests
        self._arrived_s = np.empty(0, dtype=np.float64)  # [R]
        self._kept = RowColumns()  # what does not change

    def columns(self, now: float) -> RowColumns:
        scheduler = self._scheduler
        columns = scheduler.kv.columns
        is_taken = columns.known_len > 0
        owners = columns.epoch.tobytes() + is_taken.tobytes()
        if owners != self._owners:
            self._owners = owners
            self._read(is_taken)
        rows = self._rows
        kept = self._kept
        is_decoding = np.zeros(len(is_taken), dtype=np.int32)
        is_decoding[scheduler.running_batch.rows] = 1
        num_output = columns.known_len.take(rows) - columns.prompt_len.take(rows)
        age_s = (now - self._arrived_s).astype(np.float32)
        return RowColumns(
            rids=kept.rids,
            tenants=kept.tenants,
            is_decoding=is_decoding.take(rows).tobytes(),
            prompt_len=kept.prompt_len,
            cached_len=kept.cached_len,
            kv_len=columns.kv_len.take(rows).tobytes(),
            fill_len=kept.fill_len,
            num_output=num_output.tobytes(),
            max_len=kept.max_len,
            age_s=age_s.tobytes(),
        )

    def _read(self, is_taken: BoolArray) -> None:
        """Other requests have rows than before."""
        owners = self._scheduler.kv.columns.requests[is_taken].tolist()
        requests: list[Request] = sorted(owners, key=_arrival_order)
        self._rows = np.array([one.row for one in requests], dtype=np.int32)
        self._arrived_s = np.array([one.spec.arrival_s for one in requests], dtype=np.float64)
        self._kept = RowColumns(
            rids=[one.message.rid for one in requests],
            tenants=[one.message.tenant for one in requests],
            prompt_len=ints([one.spec.prompt_len for one in requests]),
            cached_len=ints([one.cached_tokens for one in requests]),
            fill_len=ints([one.fill_len for one in requests]),
            max_len=ints([one.max_len for one in requests]),
        )


def _arrival_order(request: Request) -> int:
    return request.spec.arrival_order

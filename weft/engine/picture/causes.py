"""Why not more of the prompts of the requests with a row was cached, for a picture.

A cause is found by comparing a prompt with all remembered ones, so a picture does that for a few
requests, and each request once.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from weft.arrays import IntArray
from weft.engine.causes import cause_of
from weft.scheduler.scheduler import Scheduler

MAX_CAUSES = 2  # that are looked for in a picture


class RowCauses:
    """By row; "" and 0 until the cause of its request is known."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        num_rows = len(scheduler.kv.columns.known_len)
        self.names: list[str] = [""] * num_rows
        self.missed_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._unknown: deque[int] = deque()  # rows, the oldest first

    def forget(self, row: int) -> None:
        """The row has another request."""
        self.names[row] = ""
        self.missed_len[row] = 0
        if row not in self._unknown:
            self._unknown.append(row)

    def look(self) -> None:
        """Find a few causes."""
        columns = self._scheduler.kv.columns
        num_left = MAX_CAUSES
        while self._unknown and num_left:
            row = self._unknown.popleft()
            if not columns.known_len[row]:
                continue  # its request has left
            trace = self._scheduler.history.trace(columns.requests[row].id)
            cause = None if trace is None else cause_of(self._scheduler, trace)
            if cause is not None:
                num_left -= 1
                self.names[row] = cause.cause
                self.missed_len[row] = cause.missed_tokens

"""The first waiting requests with their reasons, for a picture.

Finding a reason reads memory that steps do not use. So reasons of the same requests are found again
only after some time.
"""

from __future__ import annotations

import numpy as np

from weft.engine.explain import Reasons
from weft.messages.picture import QueueColumns
from weft.scheduler.features.registry import Features
from weft.scheduler.request import Request
from weft.scheduler.scheduler import Scheduler

MAX_QUEUED = 50
REASONS_S = 0.5  # how long reasons are shown while the same requests wait


class QueueWatch:
    """The requests in order of arrival. The policy's order is not used, because some policies keep
    accounts of the requests that they have named."""

    def __init__(self, scheduler: Scheduler, features: Features) -> None:
        self._scheduler = scheduler
        self._features = features
        self._first: list[Request] = []
        self._read_s = 0.0  # when their reasons were found
        self._arrived_s = np.empty(0, dtype=np.float64)  # [Q]
        self._rids: list[str] = []
        self._services: list[str] = []
        self._reasons: list[str] = []

    def columns(self, now: float) -> QueueColumns:
        first = self._scheduler.waiting_queue.first_come(MAX_QUEUED)
        if not first:
            self._first = first
            return QueueColumns()
        is_fresh = 0.0 <= now - self._read_s < REASONS_S
        if first != self._first or not is_fresh:
            self._read(first)
            self._read_s = now
        age_s = (now - self._arrived_s).astype(np.float32)
        return QueueColumns(
            rids=self._rids,
            services=self._services,
            reasons=self._reasons,
            age_s=age_s.tobytes(),
        )

    def _read(self, first: list[Request]) -> None:
        self._first = first
        self._arrived_s = np.array([one.spec.arrival_s for one in first], dtype=np.float64)
        self._rids = [one.message.rid for one in first]
        self._services = [one.spec.service.name for one in first]
        reasons = Reasons(self._scheduler, self._features.grammar.queue)
        self._reasons = [reasons.of(one) for one in first]

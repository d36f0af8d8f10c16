"""Calls a function at one time, which may be changed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

LATE_S = 0.001  # so that the time has surely come


class Alarm:
    """Belongs to one event loop. Times are those of `time.monotonic`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = math.inf

    def set(self, at_s: float | None) -> None:
        """Call at this time instead; None: not at all."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at_s = math.inf
        if at_s is not None:
            self._at_s = at_s
            wait_s = max(at_s - time.monotonic(), 0.0) + LATE_S
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._call)

    def set_before(self, at_s: float | None) -> None:
        """Call at this time if that is earlier."""
        if at_s is not None and at_s < self._at_s:
            self.set(at_s)

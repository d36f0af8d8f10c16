"""When a line is asked again: a server without room is asked until it has some, one with a fault a
few times."""

from __future__ import annotations

# Waits before a line is tried again; the last one repeats.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
NO_ROOM = (429, 503)
FAULTS = (500, 502, 504)
MAX_FAULTS = 3  # tries of a line whose answers are faults of the server


class Tries:
    """The tries of one line."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._num_waits = 0

    def wait_s(self, status: int) -> float | None:
        """Seconds until the next try, after an answer with this status; None: it is the last."""
        self._num_faults += status in FAULTS
        may_try = status in NO_ROOM or 0 < self._num_faults < MAX_FAULTS
        if status < 400 or not may_try:
            return None
        wait_s = WAITS_S[min(self._num_waits, len(WAITS_S) - 1)]
        self._num_waits += 1
        return wait_s

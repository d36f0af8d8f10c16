"""When a line is asked again: a server without room is asked until it has some, one with a fault,
or one that cannot load the line's model, a few times."""

from __future__ import annotations

# Waits before a line is tried again; the last one repeats.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
NO_ROOM = (429, 503)
FAULTS = (500, 502, 504)
NOT_LOADED = "model_load_failed"  # the code of an answer whose model cannot be loaded
MAX_FAULTS = 3  # tries of a line whose answers are faults of the server


class Tries:
    """The tries of one line."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._num_waits = 0

    def wait_s(self, status: int, code: str = "") -> float | None:
        """Seconds until the next try, after an answer with this status, and an error of this code;
        None: it is the last."""
        is_fault = status in FAULTS or code == NOT_LOADED
        self._num_faults += is_fault
        may_try = 0 < self._num_faults < MAX_FAULTS
        if status in NO_ROOM and not is_fault:
            may_try = True
        if status < 400 or not may_try:
            return None
        wait_s = WAITS_S[min(self._num_waits, len(WAITS_S) - 1)]
        self._num_waits += 1
        return wait_s

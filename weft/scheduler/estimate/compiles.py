"""Expected time until grammars are compiled, from the times that ended compilations took."""

from __future__ import annotations

from collections import deque

MAX_TIMES = 64


class CompilesSeen:
    def __init__(self) -> None:
        # Seconds from a request's arrival until its grammar was compiled, without those from a
        # cache.
        self._times: deque[float] = deque(maxlen=MAX_TIMES)

    def note(self, seconds: float) -> None:
        """A request has waited so long for a compilation."""
        self._times.append(seconds)

    def left_s(self, waited_s: float) -> float | None:
        """Seconds that a request that has waited `waited_s` is expected to wait still. None if no
        compilation has ended yet."""
        if not self._times:
            return None
        longer = [one for one in self._times if one > waited_s]
        if not longer:
            # It takes longer than all others: as long again.
            return waited_s
        return sum(longer) / len(longer) - waited_s

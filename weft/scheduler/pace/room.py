"""How long steps of online requests may take because of background requests.

The measure is what their steps would take alone, on average. Nobody sees that while background
requests are there, because longer steps keep online requests for longer, so that more of them run
at once. But the share `u` of the time of their steps that their own tokens take stays the same;
alone, the rest would be the fixed part of these steps, `step_s` each:

    alone_s = step_s / (1 - u)

The average is over a minute: steps that are all of nearly one length give the most tokens for the
same longest step. A burst of online requests does not make them longer, for background rows rest
in it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from weft.scheduler.pace.step_cost import CostModel

WINDOW_S = 60.0  # steps of this time count; older ones less and less
FIRST_S = 0.1  # of steps without online tokens, which are assumed beside those that were seen
MAX_SHARE = 0.95
MAX_PLANNED = 64  # steps whose time is not known yet: some never have one


class PlannedStep(NamedTuple):
    number: int
    online_s: float  # that the tokens of online requests take; 0: it has none


class StepRoom:
    """Knows the time of the last steps. `max_slowdown`: how many times as long as alone a step of
    online requests may take."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._planned: deque[PlannedStep] = deque(maxlen=MAX_PLANNED)
        # Sums over the last steps with online requests: of their time, and of that of online
        # tokens.
        self._all_s = 0.0
        self._tokens_s = 0.0

    def planned(self, number: int, online_s: float) -> None:
        """The tokens of online requests in this step take `online_s` by the cost model."""
        self._planned.append(PlannedStep(number, online_s))

    def observe(self, number: int, seconds: float) -> None:
        """A step has taken `seconds`."""
        while self._planned and self._planned[0].number < number:
            self._planned.popleft()
        if not self._planned or self._planned[0].number != number:
            return
        step = self._planned.popleft()
        kept = max(1 - seconds / WINDOW_S, 0.0)
        has_online = step.online_s > 0
        self._all_s = self._all_s * kept + seconds * has_online
        self._tokens_s = self._tokens_s * kept + step.online_s

    def bound_s(self, cost: CostModel) -> float:
        """How long a step may take."""
        share = min(self._tokens_s / (self._all_s + FIRST_S), MAX_SHARE)
        return self._max_slowdown * cost.step_s / (1 - share)

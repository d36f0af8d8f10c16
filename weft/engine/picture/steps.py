"""Notes the steps of an engine while a client watches. A note takes a few microseconds per step."""

from __future__ import annotations

from collections import deque

from weft.engine.core import EngineCore
from weft.engine.picture.columns import floats, ints, longs
from weft.messages.picture import StepColumns
from weft.scheduler.batch import Batch

MAX_STEPS = 2_048  # number of steps that are remembered

# A step in the order of `StepColumns`. The last number is the time when it was planned, and after
# its end its duration. A plain tuple, because creating a named one takes several times as long.
StepMark = tuple[int, int, int, int, int, int, float]


class StepWatch:
    """Notes all steps from the first one planned after its creation."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._planned: deque[StepMark] = deque()  # steps that are running
        self._done: deque[StepMark] = deque(maxlen=MAX_STEPS)
        self._last: Batch | None = core.scheduler.last_batch
        self._done_s = 0.0  # when the last step ended

    def look(self, now: float) -> None:
        """After a call of `Engine.step`: note the step that it planned, and the steps that have
        ended."""
        core = self._core
        batch = core.scheduler.last_batch
        if batch is not None and batch is not self._last:
            self._planned.append(self._mark(batch))
        self._last = batch
        in_flight = core.loop.first_in_flight
        while self._planned:
            mark = self._planned[0]
            if in_flight is not None and mark[0] >= in_flight:
                return
            self._planned.popleft()
            # The device computes one step after another.
            began_s = max(mark[-1], self._done_s)
            self._done_s = now
            self._done.append((*mark[:-1], now - began_s))

    def _mark(self, batch: Batch) -> StepMark:
        plan = batch.plan
        return (
            plan.step,
            int(plan.mode),
            len(plan.rows),
            len(batch.prefills),
            plan.num_tokens,
            len(self._core.scheduler.waiting_queue),
            self._core.began_s,
        )

    def columns(self, since: int) -> StepColumns:
        """The remembered steps with a number above `since`."""
        marks: list[StepMark] = []
        for mark in reversed(self._done):
            if mark[0] <= since:
                break
            marks.append(mark)
        if not marks:
            return StepColumns()
        marks.reverse()
        numbers, modes, rows, prompts, tokens, waiting, seconds = zip(*marks, strict=True)
        return StepColumns(
            numbers=longs(numbers),
            modes=ints(modes),
            num_rows=ints(rows),
            num_prompts=ints(prompts),
            num_tokens=ints(tokens),
            num_waiting=ints(waiting),
            seconds=floats(seconds),
        )

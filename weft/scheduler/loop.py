"""One loop with a depth: choose a step, launch it, commit the oldest.

Depth 0 waits for each step before it plans the next. Depth 1 overlaps: while the device runs step n, step n+1 is
planned and launched; its input tokens are on the device, the scheduler learns them one step late. Behind a step that is
awaited (`Extras.is_awaited`) nothing is planned before its result is known: the next mask of a grammar depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from weft.executor.plan import Runner, Step
from weft.messages.replies import StepOutput
from weft.scheduler.batch import Batch
from weft.scheduler.scheduler import Scheduler


class Loop:
    """`clock` gives seconds; `on_failure` is told of an exception that a step raised."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        clock: Callable[[], float],
        depth: int,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._on_failure = on_failure
        self._in_flight: deque[tuple[Batch, Step, float]] = deque()  # and when it was launched
        self._done_s = 0.0  # when the result of the last step came
        self.num_results = 0  # that have come
        self.is_stuck = False  # the last call of `step` found nothing to do, though requests are open

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_work

    def step(self) -> StepOutput | None:
        """Launch the next step, if there is one, and commit the oldest when enough are in flight."""
        in_flight = self._in_flight
        now = self._clock()
        drains = any(batch.is_awaited for batch, _, _ in in_flight)
        batch = None if drains else self._scheduler.get_next_batch_to_run(now, in_flight=bool(in_flight))
        self.is_stuck = batch is None and not in_flight
        if batch is not None:
            in_flight.append((batch, self._runner.launch(batch.plan), now))
        if len(in_flight) > self._depth or (batch is None and in_flight):
            return self._commit(*in_flight.popleft())
        return self._scheduler.take_finished()

    def rest(self) -> StepOutput | None:
        """Plan nothing; end what is over its deadline. Nothing is in flight."""
        self.is_stuck = True
        self._scheduler.expire(self._clock())
        return self._scheduler.take_finished()

    def settle(self) -> list[StepOutput]:
        """Wait for everything in flight and commit it."""
        outputs = []
        while self._in_flight:
            outputs.append(self._commit(*self._in_flight.popleft()))
        return [output for output in outputs if output is not None]

    def _commit(self, batch: Batch, step: Step, launched_s: float) -> StepOutput | None:
        try:
            result = step.result()
        except Exception as exc:
            self._on_failure(exc)
            self._drain()
            self._scheduler.process_batch_failure(batch, "the model failed on this request's step")
            return self._scheduler.take_finished()
        self.num_results += 1
        began_s, self._done_s = max(launched_s, self._done_s), self._clock()
        self._scheduler.pace.observe(batch, self._done_s - began_s)
        return self._scheduler.process_batch_result(batch, result, self._done_s)

    def _drain(self) -> None:
        """Wait for steps that were launched behind a failed one. What they computed is worth nothing."""
        while self._in_flight:
            _, step, _ = self._in_flight.popleft()
            try:
                step.result()
            except Exception as exc:
                self._on_failure(exc)

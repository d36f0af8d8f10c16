"""One loop with a depth: choose a step, launch it, commit the oldest.

Depth 0 waits for each step before it plans the next. Depth 1 overlaps: while the device runs step n, step n+1 is
planned and launched; its input tokens are on the device, the scheduler learns them one step late. Behind a step that is
awaited (`Extras.blocks_overlap`) nothing is planned before its result is known: the next mask of a grammar depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from weft.messages.replies import StepOutput
from weft.plan.step import Runner, Step
from weft.scheduler.batch import Batch
from weft.scheduler.scheduler import Scheduler

DEVICE_FAILED = "the model failed on this request's step"
RESULT_FAILED = "the engine failed on the result of this request's step"
PLAN_FAILED = "the engine failed twice while it planned for this request"


class Loop:
    """`clock` gives seconds; `on_failure` is told of an exception that a step of the device raised, `on_fault` of one
    that the scheduler raised.

    After either the books begin anew, and what is known of the requests is computed again. Those whose step it was end
    with an error; where no step can be named, those that were planned for, if it was not the first time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        clock: Callable[[], float],
        depth: int,
        on_failure: Callable[[Exception], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._on_failure = on_failure
        self._on_fault = on_fault
        self._in_flight: deque[tuple[Batch, Step, float]] = deque()  # and when it was launched
        self._now = 0.0  # when the last step was planned
        self._done_s = 0.0  # when the result of the last step came
        self.num_results = 0  # that have come
        self.is_stuck = (
            False  # the last call of `step` found nothing to do, though requests are open
        )

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_work

    def step(self) -> StepOutput | None:
        """Launch the next step, if there is one, and commit the oldest when enough are in flight."""
        if self._scheduler.is_in_doubt:
            self.repair()
        try:
            batch = self._plan()
        except Exception as exc:
            self.begin_anew(exc)
            return self._scheduler.take_output()
        if self._scheduler.is_in_doubt:
            self.repair()
            return self._scheduler.take_output()
        if batch is not None and not self._launch(batch):
            return self._scheduler.take_output()
        in_flight = self._in_flight
        if len(in_flight) > self._depth or (batch is None and in_flight):
            return self._commit(*in_flight.popleft())
        return self._scheduler.take_output()

    def rest(self) -> StepOutput | None:
        """Plan nothing; end what is over its deadline. Nothing is in flight."""
        self.is_stuck = True
        self._scheduler.expire(self._clock())
        return self._scheduler.take_output()

    def settle(self) -> list[StepOutput]:
        """Wait for everything in flight and commit it."""
        outputs = []
        while self._in_flight:
            outputs.append(self._commit(*self._in_flight.popleft()))
        return [output for output in outputs if output is not None]

    def begin_anew(self, exc: Exception) -> None:
        """The scheduler raised, nobody knows for whom: its books are in doubt."""
        self._on_fault(exc)
        self._drain()
        self.is_stuck = False
        suspects = self._scheduler.suspects()
        self._scheduler.recompute(suspects, PLAN_FAILED, "a fault was found", in_doubt=True)

    def repair(self) -> None:
        """The books are in doubt, for something was left half way, and whoever it was about has ended."""
        self._drain()
        self.is_stuck = False
        self._scheduler.recompute(set(), "", "a fault was found", in_doubt=True)

    def _plan(self) -> Batch | None:
        """Choose the next step. None if there is nothing to run, or nothing before a result is known."""
        in_flight = self._in_flight
        drains = any(batch.blocks_overlap for batch, _, _ in in_flight)
        self._now = self._clock()
        batch = None
        if not drains:
            batch = self._scheduler.get_next_batch_to_run(self._now, in_flight=bool(in_flight))
        self.is_stuck = batch is None and not in_flight
        return batch

    def _launch(self, batch: Batch) -> bool:
        """Returns whether the device took the step."""
        try:
            step = self._runner.launch(batch.plan)
        except Exception as exc:
            self._give_up(batch, exc)
            return False
        self._in_flight.append((batch, step, self._now))
        return True

    def _commit(self, batch: Batch, step: Step, launched_s: float) -> StepOutput | None:
        try:
            result = step.result()
        except Exception as exc:
            self._give_up(batch, exc)
            return self._scheduler.take_output()
        self.num_results += 1
        began_s, self._done_s = max(launched_s, self._done_s), self._clock()
        try:
            self._scheduler.pace.observe(batch, self._done_s - began_s)
            return self._scheduler.process_batch_result(batch, result, self._done_s)
        except Exception as exc:
            self._on_fault(exc)
            self._drain()
            failed = self._scheduler.open_ids(batch)
            self._scheduler.recompute(failed, RESULT_FAILED, "a fault was found", in_doubt=True)
            return self._scheduler.take_output()

    def _give_up(self, batch: Batch, exc: Exception) -> None:
        """The device failed on a step: its requests end."""
        self._on_failure(exc)
        self._drain()
        self._scheduler.process_batch_failure(batch, DEVICE_FAILED)

    def _drain(self) -> None:
        """Wait for steps that were launched before or behind a failed one. What they computed is worth nothing."""
        while self._in_flight:
            _, step, _ = self._in_flight.popleft()
            try:
                step.result()
            except Exception as exc:
                self._on_failure(exc)

"""One loop with a depth: choose a step, launch it, commit the oldest.

Depth 0 waits for each step before it plans the next. Depth 1 overlaps: while the device runs step
n, step n+1 is planned and launched; its input tokens are on the device, and the scheduler learns
them one step later. After a step that blocks overlap (`Batch.blocks_overlap`), no step is planned
before its result is known, for example because the next mask of a grammar depends on it.

    depth 0   plan 1 ▸ launch 1 ▸ commit 1 ▸ plan 2 ▸ launch 2 ▸ commit 2
    depth 1   plan 1 ▸ launch 1 ▸ plan 2 ▸ launch 2 ▸ commit 1 ▸ plan 3 ▸ launch 3 ▸ commit 2

After an exception of the device or the scheduler, the scheduler's state is reset, and the known
tokens of the requests are computed again. The requests of the failed step end with an error. If no
step is to blame, the requests that were being planned end if this was not their first fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from weft.memory.allocator import OutOfPages
from weft.messages.replies import StepOutput
from weft.plan.step import Runner, Step
from weft.scheduler.batch import Batch
from weft.scheduler.recovery import Recovery
from weft.scheduler.scheduler import Scheduler

DEVICE_FAILED = "the model failed on this request's step"
RESULT_FAILED = "the engine failed on the result of this request's step"
PLAN_FAILED = "the engine failed twice while it planned for this request"


class LaunchedStep(NamedTuple):
    """A step that the device is computing."""

    batch: Batch
    step: Step
    launched_s: float


class Loop:
    """`clock` gives seconds. `on_failure` gets each exception that a step of the device raises,
    `on_fault` each exception of the scheduler."""

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
        self._recovery = Recovery(scheduler)
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._on_failure = on_failure
        self._on_fault = on_fault
        self._in_flight: deque[LaunchedStep] = deque()  # oldest first
        self._now = 0.0  # when the last step was planned
        self._done_s = 0.0  # when the result of the last step was known
        self.num_results = 0  # number of results so far
        # The latest consecutive calls of `step` without a step to plan or in flight.
        self.num_stuck = 0

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_work

    @property
    def first_in_flight(self) -> int | None:
        """The number of the oldest step whose result is not known; None if there is none."""
        return self._in_flight[0].batch.plan.step if self._in_flight else None

    def step(self) -> StepOutput | None:
        """Launch the next step, if there is one, and commit the oldest step if enough are in
        flight."""
        scheduler = self._scheduler
        if scheduler.outbox.is_in_doubt:
            self.repair()
        try:
            batch = self._plan()
        except Exception as exc:
            self.begin_anew(exc)
            return scheduler.outbox.take_output()
        # Planning also ends requests whose deadline is over. Exceptions of their hooks are handled
        # here.
        if scheduler.outbox.is_in_doubt:
            self.repair()
            return scheduler.outbox.take_output()
        if batch is not None and not self._launch(batch):
            return scheduler.outbox.take_output()
        in_flight = self._in_flight
        if len(in_flight) > self._depth or (batch is None and in_flight):
            return self._commit(in_flight.popleft())
        return scheduler.outbox.take_output()

    def rest(self) -> StepOutput | None:
        """Plan no step; end the requests whose deadlines are over. No step may be in flight."""
        self.num_stuck += 1
        self._scheduler.expire(self._clock())
        return self._scheduler.outbox.take_output()

    def settle(self) -> list[StepOutput]:
        """Wait for everything in flight and commit it."""
        outputs = []
        while self._in_flight:
            output = self._commit(self._in_flight.popleft())
            if output is not None:
                outputs.append(output)
        return outputs

    def begin_anew(self, exc: Exception) -> None:
        """The scheduler raised `exc`, and no request is known as the cause: reset its state."""
        self._on_fault(exc)
        self._drain()
        self.num_stuck = 0
        suspects = self._recovery.suspects()
        message = PLAN_FAILED
        if isinstance(exc, OutOfPages):
            message = f"{PLAN_FAILED}: {exc}"
        self._recovery.recompute(suspects, message, "a fault was found", in_doubt=True)

    def repair(self) -> None:
        """Reset the scheduler's state, because an operation was interrupted. The requests that it
        concerned have ended."""
        self._drain()
        self.num_stuck = 0
        self._recovery.recompute(set(), "", "a fault was found", in_doubt=True)

    def _plan(self) -> Batch | None:
        """Choose the next step. None if there is nothing to run, or nothing before a result is
        known."""
        in_flight = self._in_flight
        self._now = self._clock()
        # No step was planned after one that blocks overlap, so that one is the last, if there is
        # one.
        if in_flight and in_flight[-1].batch.blocks_overlap:
            self.num_stuck = 0
            return None
        batch = self._scheduler.get_next_batch_to_run(self._now, in_flight=bool(in_flight))
        is_stuck = batch is None and not in_flight
        self.num_stuck = self.num_stuck + 1 if is_stuck else 0
        return batch

    def _launch(self, batch: Batch) -> bool:
        """Returns whether the device took the step."""
        try:
            step = self._runner.launch(batch.plan)
        except Exception as exc:
            self._give_up(batch, exc)
            return False
        self._in_flight.append(LaunchedStep(batch, step, self._now))
        return True

    def _commit(self, flight: LaunchedStep) -> StepOutput | None:
        """Wait for the result of a step, and let the scheduler process it."""
        scheduler = self._scheduler
        batch = flight.batch
        try:
            result = flight.step.result()
        except Exception as exc:
            self._give_up(batch, exc)
            return scheduler.outbox.take_output()
        self.num_results += 1
        # The device computes steps one after the other: this one began when the previous one ended.
        began_s = max(flight.launched_s, self._done_s)
        self._done_s = self._clock()
        try:
            if scheduler.pace is not None:
                seconds = self._done_s - began_s - result.encoder_s
                scheduler.pace.observe(batch, seconds)
            return scheduler.process_batch_result(batch, result, self._done_s, began_s)
        except Exception as exc:
            self._on_fault(exc)
            self._drain()
            failed = self._recovery.open_ids(batch)
            self._recovery.recompute(failed, RESULT_FAILED, "a fault was found", in_doubt=True)
            return scheduler.outbox.take_output()

    def _give_up(self, batch: Batch, exc: Exception) -> None:
        """The device failed on a step: end its requests."""
        self._on_failure(exc)
        self._drain()
        self._recovery.step_failed(batch, DEVICE_FAILED)

    def _drain(self) -> None:
        """After a failed step, wait for the other steps in flight. Their results are discarded."""
        while self._in_flight:
            flight = self._in_flight.popleft()
            try:
                flight.step.result()
            except Exception as exc:
                self._on_failure(exc)

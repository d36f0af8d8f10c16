"""The loop of steps, and what all services of an engine share: scheduler, loop, clock, messages.

It knows the hooks, but not the services that use them.

`Loop` has a depth: choose a step, launch it, commit the oldest.

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

from weft.engine.guard import Guard
from weft.engine.hooks import ServiceHooks
from weft.engine.surroundings import Surroundings
from weft.memory.allocator import OutOfPages
from weft.messages.codec import FromEngine
from weft.messages.replies import StepOutput
from weft.messages.status import Stats
from weft.observe.log import EventLog
from weft.observe.survivable import survived
from weft.plan.step import Runner, Step
from weft.scheduler.batch import Batch
from weft.scheduler.history import EventKind
from weft.scheduler.recovery import Recovery
from weft.scheduler.scheduler import Scheduler

log = EventLog("engine")

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
        except BaseException as exc:
            self.begin_anew(survived(exc))
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

    @property
    def is_ready(self) -> bool:
        """Whether no step is in flight, and nothing has happened since the last one."""
        return not self._in_flight and not self._depth

    def skipped(self, num_steps: int, began_s: float, ended_s: float) -> None:
        """Steps were made at once (`sim/uniform.py`). The last one began and ended then."""
        self.num_results += num_steps
        self.num_stuck = 0
        self._now = began_s
        self._done_s = ended_s

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
            scheduler.pace.observe(batch, self._done_s - began_s - result.encoder_s)
            return scheduler.process_batch_result(batch, result, self._done_s, began_s)
        except BaseException as exc:
            self._on_fault(survived(exc))
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


class EngineCore:
    """`depth`: steps that are planned while another one runs."""

    def __init__(self, scheduler: Scheduler, around: Surroundings, depth: int) -> None:
        self.scheduler = scheduler
        self.recovery = Recovery(scheduler)
        self.clock = around.clock
        self.hooks = ServiceHooks()
        self.guard = Guard(scheduler, around.report_failure)
        self.loop = Loop(
            scheduler,
            around.runner,
            clock=around.clock,
            depth=depth,
            on_failure=self.guard.on_failure,
            on_fault=self.guard.on_fault,
        )
        # The messages that the current step, or the next one, returns. All messages go through this
        # one list, so that they are sent in the order of their creation.
        self.outbox: list[FromEngine] = []
        # Sent after all messages. It is separate because it is no work: an engine that sends
        # nothing else may sleep.
        self.load_report: Stats | None = None
        # Times of the current call of `Engine.step`, or of the last one.
        self.began_s = 0.0
        self.ended_s = 0.0
        self.had_work = False  # when the call began
        self.has_sent = False  # it returned something besides the load report
        # Since then a message came, or the step raised, so the next step may find work.
        self.has_news = False

    @property
    def has_work(self) -> bool:
        """Whether the engine should step without waiting for a message."""
        return self.loop.has_work or bool(self.outbox) or bool(self.hooks.working)

    @property
    def is_plain(self) -> bool:
        """Whether the next step only runs a step of the device: no message has come, none is to be
        sent, and no service takes part."""
        hooks = self.hooks
        is_observed = hooks.before_step or hooks.filter_output or hooks.working
        return self.loop.is_ready and not (self.has_news or self.outbox or is_observed)

    def send(self, message: FromEngine) -> None:
        """Let the step return this message, after those that are there."""
        self.outbox.append(message)

    def send_output(self, output: StepOutput | None) -> None:
        """Let the step return the part of this output that is for the front."""
        for service in self.hooks.filter_output:
            if output is None:
                return
            output = service.filter_output(output)
        if output is not None:
            self.outbox.append(output)

    def take_outbox(self) -> list[FromEngine]:
        """All messages to send, in order. The step returns them."""
        taken = self.outbox
        self.outbox = []
        self.has_sent = bool(taken)
        if self.load_report is not None:
            taken.append(self.load_report)
            self.load_report = None
        return taken

    def settle(self) -> None:
        """Wait for all steps in flight, and process their results."""
        for output in self.loop.settle():
            self.send_output(output)

    def repair_if_in_doubt(self) -> None:
        """Recompute if an operation was interrupted; report exceptions that were raised when
        requests ended, and what decode steps lacked."""
        if self.scheduler.outbox.is_in_doubt:
            self.loop.repair()
        if self.scheduler.outbox.out_of_memory:
            log.seldom("out_of_memory", reason=self.scheduler.outbox.out_of_memory)
            self.scheduler.outbox.out_of_memory = ""
        if self.scheduler.outbox.faults:
            for fault in self.scheduler.outbox.take_faults():
                self.guard.on_fault(fault)

    def note(self, id: int, kind: EventKind, detail: str, now: float) -> None:
        """Record an event in the history of a request."""
        step = self.scheduler.planner.num_steps
        self.scheduler.history.note(id, kind, detail, now, step)

"""The state that all services of an engine share: scheduler, loop, clock, and the messages to send.

It knows the hooks, but not the services that use them.
"""

from __future__ import annotations

from weft.engine.guard import Guard
from weft.engine.hooks import ServiceHooks
from weft.engine.loop import Loop
from weft.engine.surroundings import Surroundings
from weft.messages.codec import FromEngine
from weft.messages.replies import StepOutput
from weft.messages.status import Stats
from weft.observe.log import EventLog
from weft.scheduler.history import EventKind
from weft.scheduler.recovery import Recovery
from weft.scheduler.scheduler import Scheduler

log = EventLog("engine")


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
        return self.loop.has_work or bool(self.outbox) or self.hooks.has_work

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

"""The engine: submit messages, run steps, send the results.

    submit(request) ─▶ arrivals ─▶ scheduler
    submit(message) ─▶ a handler ─▶ scheduler and services
    step()          ─▶ before_step ─▶ plan, launch, commit ─▶ after_step ─▶ messages to send

It is used by the engine process and, without a process of its own, by `weft.LLM`. It knows no
socket and no tensor: the runner and the clock are arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.control.handlers import HANDLERS, answer
from weft.engine.guard import LEAVES_STATE_INTACT, EngineBroken
from weft.engine.services import Services
from weft.engine.surroundings import (
    NoProcessors,
    NoProfiler,
    Profiler,
    Surroundings,
)
from weft.grammar.protocol import Grammars, NoGrammars
from weft.memory.events.protocol import CacheEvents, NoCacheEvents
from weft.memory.handoff.protocol import Handoff, NoHandoff
from weft.memory.tiers.protocol import NoTiers, Tiers
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.requests import BatchGenerate, GenerateRequest
from weft.observe.log import EventLog
from weft.observe.survivable import is_survivable, survived
from weft.plan.step import Runner
from weft.scheduler.features.processors import ProcessorChecks
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

log = EventLog("engine")


class Engine:
    """`overlap`: steps that are planned while another one runs: none (False), one (True), or more.

    `on_failure` gets each exception that a step of the device or the scheduler raises.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        runner: Runner,
        *,
        clock: Callable[[], float],
        overlap: int,
        on_failure: Callable[[Exception], None],
        profiler: Profiler | None = None,
        grammars: Grammars | None = None,
        processors: ProcessorChecks | None = None,
        tiers: Tiers | None = None,
        handoff: Handoff | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        self.depth = int(overlap)
        self.surroundings = Surroundings(
            runner=runner,
            clock=clock,
            report_failure=on_failure,
            profiler=profiler or NoProfiler(),
            grammars=grammars or NoGrammars("this engine compiles no grammars"),
            processors=processors or NoProcessors(),
            tiers=tiers or NoTiers(),
            handoff=handoff or NoHandoff(),
            cache_events=cache_events or NoCacheEvents(),
        )
        self._begin(settings)

    def _begin(self, settings: SchedulerSettings) -> None:
        self.services = Services(settings, self.surroundings, self.depth)
        self.core = self.services.core

    # Journals, lines of the log and measurements begin here, after the warm-up.

    def warm_up(self, request: GenerateRequest) -> None:
        """Run a request of which nothing is told and nothing is remembered."""
        self.core.hooks.detach(self.services.observers.prefill_log)
        self.submit(request)
        while self.has_work:
            self.step()
        self.start_over()

    def start_over(self) -> None:
        """Forget everything that was done: cache, counters, history. No request may be open."""
        assert not self.has_work, "requests are open"
        self.surroundings.tiers.settle()
        self._begin(self.scheduler.settings)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called without waiting for a message."""
        return self.core.has_work

    @property
    def is_stopped(self) -> bool:
        """Whether a message has asked the engine to end, and no work is left."""
        return self.services.flow.shutdown.is_complete

    @property
    def wait_s(self) -> float:
        """How long the caller of `step` may sleep if no message comes: 0 if a step may find work,
        infinite without work."""
        return self.services.idle.wait_s

    @property
    def min_step_s(self) -> float:
        """The time that the caller of `step` must let pass from one step to the next."""
        return self.services.idle.min_step_s

    def submit(self, message: ToEngine) -> FromEngine | None:
        """Process a message. Returns the reply if there is one at once.

        A message without a handler is dropped. If a handler raises, only the requests of its
        message end (`guard.py`). Raises EngineBroken.
        """
        core = self.core
        core.has_news = True
        try:
            # Almost all messages are requests: they need neither a reply nor the table of handlers.
            if isinstance(message, GenerateRequest):
                self.services.arrivals.take_in(message, core.clock())
                return None
            return self._handle(message)
        except EngineBroken:
            raise
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            if not isinstance(message, LEAVES_STATE_INTACT):
                core.loop.repair()
            return core.guard.message_failed(message, exc)
        finally:
            core.repair_if_in_doubt()

    def _handle(self, message: ToEngine) -> FromEngine | None:
        if isinstance(message, BatchGenerate):
            self.services.arrivals.take_in_batch(message, self.core.clock())
            return None
        handler = HANDLERS.get(type(message))
        if handler is None:
            self.scheduler.counters.messages.num_unknown += 1
            log.seldom("unknown_message", type=type(message).__name__)
            return None
        return answer(self.services, handler, message)

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        """A reply about the requests `ids` could not be sent: end them with an error."""
        self.core.has_news = True
        try:
            self.core.guard.lose(ids, message)
        finally:
            self.core.repair_if_in_doubt()

    def step(self) -> list[FromEngine]:
        """Run one step, if there is work. Returns the messages to send, in order.

        If the scheduler or a service raises, only the requests concerned end. Raises EngineBroken.
        """
        core = self.core
        try:
            self._run_step()
        except EngineBroken:
            raise
        except BaseException as exc:
            core.loop.begin_anew(survived(exc))
            core.has_news = True
        core.repair_if_in_doubt()
        core.send_output(core.scheduler.outbox.take_output())
        return core.take_outbox()

    def _run_step(self) -> None:
        core = self.core
        hooks = core.hooks
        guard = core.guard
        guard.num_turns += 1
        core.began_s = core.clock()
        core.had_work = core.loop.has_work
        if core.has_news:
            core.has_news = False
            core.loop.num_stuck = 0  # earlier steps found no work, but this one may
        # If a job ends in `before_step`, its reply is sent before another step is planned.
        is_paused = hooks.holds_steps
        for service in hooks.before_step:
            try:
                service.before_step(core.began_s)
            except BaseException as exc:
                guard.hook_failed(service.name, survived(exc))
        output = core.loop.rest() if is_paused else core.loop.step()
        core.repair_if_in_doubt()
        core.send_output(output)
        core.ended_s = core.clock()
        for service in hooks.after_step:
            try:
                service.after_step(core.ended_s)
            except BaseException as exc:
                guard.hook_failed(service.name, survived(exc))

"""The engine: submit messages, step, send what comes out.

    submit(request) ─▶ arrivals ─▶ scheduler
    submit(message) ─▶ a handler ─▶ scheduler and services
    step()          ─▶ before_step ─▶ plan, launch, commit ─▶ after_step ─▶ messages to send

Used by the engine process and, in one process, by `weft.LLM`. Knows no socket and no tensor: the
runner and the clock are handed in.
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
from weft.observe.survivable import is_survivable
from weft.plan.step import ForwardMode, Runner
from weft.scheduler.features.processors import ProcessorChecks
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

log = EventLog("engine")


class Engine:
    """`overlap`: steps that are planned while one runs: none (False), one (True), or more.

    `on_failure` gets each exception that a step of the device, or the scheduler, raised.
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

    # A journal begins here, and what is measured: behind the warm-up.

    def start_over(self) -> None:
        """Forget all that was done: cache, counters, history. Only while nothing is open."""
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
        """A message has asked the engine to end, and it has nothing left to do."""
        return self.services.shutdown.is_complete

    @property
    def wait_s(self) -> float:
        """The caller of `step` may sleep so long if no message comes: 0 if a step may find
        something to do, infinite without work."""
        return self.services.idle.wait_s

    @property
    def min_step_s(self) -> float:
        """The caller of `step` lets so much time pass from one step to the next."""
        return self.services.idle.min_step_s

    @property
    def last_mode(self) -> ForwardMode | None:
        """What the last step ran, if there was one and there is work."""
        batch = self.scheduler.last_batch
        if batch is None or not self.has_work:
            return None
        return batch.mode

    def submit(self, message: ToEngine) -> FromEngine | None:
        """Take a message in. Returns the reply if there is one at once.

        A message without a handler is dropped. One whose handler raises ends what it brought, and
        nothing else (`guard.py`). Raises EngineBroken.
        """
        core = self.core
        core.has_news = True
        try:
            # Almost all messages are requests: they need no reply and no table of handlers.
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
            self.scheduler.counters.num_unknown += 1
            log.seldom("unknown_message", type=type(message).__name__)
            return None
        return answer(self.services, handler, message)

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        """A reply that was about the requests `ids` could not be sent: they end with an error."""
        self.core.has_news = True
        try:
            self.core.guard.lose(ids, message)
        finally:
            self.core.repair_if_in_doubt()

    def step(self) -> list[FromEngine]:
        """Run one step, if there is work. Returns what is to be sent, in order.

        What the scheduler or a service raises ends no more than the requests concerned. Raises
        EngineBroken.
        """
        core = self.core
        try:
            self._run_step()
        except EngineBroken:
            raise
        except Exception as exc:
            core.loop.begin_anew(exc)
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
            core.loop.num_stuck = 0  # steps were in vain until now: this one need not be
        # Of a job that ends in `before_step`, the reply goes out before any other step is planned.
        is_held = hooks.holds_steps
        for service in hooks.before_step:
            try:
                service.before_step(core.began_s)
            except Exception as exc:
                guard.hook_failed(service.name, exc)
        output = core.loop.rest() if is_held else core.loop.step()
        core.repair_if_in_doubt()
        core.send_output(output)
        core.ended_s = core.clock()
        for service in hooks.after_step:
            try:
                service.after_step(core.ended_s)
            except Exception as exc:
                guard.hook_failed(service.name, exc)

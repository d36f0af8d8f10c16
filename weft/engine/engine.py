"""Scheduler, loop and control handlers as one object: submit messages, step, send what comes out.

Used by the engine process and, in one process, by `weft.LLM`. Knows no socket and no tensor: the runner and the clock
are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from weft.engine import grammar, guard
from weft.engine.control.handlers import HANDLERS, answer, answer_flushes
from weft.engine.control.profile import NoProfiler, Profiler
from weft.engine.device_jobs import Device
from weft.engine.health import HealthChecks
from weft.engine.idle import Waits
from weft.engine.input_gate import InputGate
from weft.engine.kv_audit import KvAuditor
from weft.engine.loop import Loop
from weft.engine.pause import Pause
from weft.engine.processors import NoProcessors, Processors
from weft.engine.sessions import look_after
from weft.grammar.protocol import Grammars, NoGrammars
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import HealthCheckReply
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort
from weft.messages.status import Stats
from weft.observe.log import EventLog
from weft.observe.survivable import is_survivable
from weft.plan.step import ForwardMode, Runner
from weft.scheduler.feature import Part
from weft.scheduler.features.allowed import Allowed
from weft.scheduler.features.bad_words import BadWords
from weft.scheduler.features.bias import Bias
from weft.scheduler.features.grammar import GrammarPart
from weft.scheduler.features.hidden import HiddenStatesPart
from weft.scheduler.features.logprobs import LogprobsPart
from weft.scheduler.features.penalties import PenaltiesPart
from weft.scheduler.features.pooling import PoolingPart
from weft.scheduler.features.processors import LogitProcessors
from weft.scheduler.features.prompt_logprobs import PromptLogprobsPart
from weft.scheduler.features.sessions import Sessions
from weft.scheduler.features.thinking import ThinkingBudget
from weft.scheduler.features.vectors import VectorsPart
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings

STATS_INTERVAL_S = 1.0
MAX_FAILURES_IN_A_ROW = 3

log = EventLog("engine")
T = TypeVar("T")


class EngineBroken(RuntimeError):
    """The device failed on several steps in a row: there is no point in going on."""


class Engine:
    """`overlap` is how many steps are planned while one runs: none (False), one (True), or more.

    `on_failure` is told of each exception that a step of the device, or the scheduler, raised.
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
        processors: Processors | None = None,
    ) -> None:
        self.depth = int(overlap)
        self.clock = clock
        self.flushes: list[
            tuple[float, int]
        ] = []  # deadline and call of cache flushes that wait for an idle engine
        self.audits: list[int] = []  # calls of audits that are to be made
        self.stop_at: float | None = None  # when open requests are aborted and the engine ends
        self.min_step_s = 0.0  # that whoever calls `step` lets pass from one to the next
        self.profiler = profiler or NoProfiler()
        self.input = InputGate()
        self.pause = Pause()
        self.device = Device()
        self.health = HealthChecks()
        self._outbox: list[FromEngine] = []  # what came up between two steps
        self._failing: set[str] = set()  # what of a step has failed before
        self._waits = Waits()
        self._report_failure = on_failure
        self._failures_in_a_row = 0
        self._num_failures = 0
        self._stats_at = 0.0
        self._busy_s = 0.0
        self._runner = runner
        self._grammars = grammars or NoGrammars("this engine compiles no grammars")
        self.processors = processors or NoProcessors()
        self._compose(settings)

    def _compose(self, settings: SchedulerSettings) -> None:
        self.sessions = Sessions(settings.sessions)
        self.vectors = VectorsPart(settings.hidden_size)
        self.grammar = GrammarPart(self._grammars, settings.eos_token_ids)
        parts: list[Part] = [
            *(
                Bias(settings.eos_token_ids, settings.vocab_size),
                PenaltiesPart(),
                LogprobsPart(),
                PromptLogprobsPart(),
            ),
            *(HiddenStatesPart(), self.vectors, PoolingPart()),
            *(Allowed(settings.vocab_size), BadWords(), ThinkingBudget(), LogitProcessors()),
            *(self.sessions, self.grammar),
        ]
        self.scheduler = Scheduler(settings, parts)
        self._auditor = KvAuditor(self.scheduler)
        self._loop = Loop(
            self.scheduler,
            self._runner,
            clock=self.clock,
            depth=self.depth,
            on_failure=self._on_failure,
            on_fault=self._on_fault,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called without waiting for a message."""
        is_asked = bool(
            self.flushes
            or self.audits
            or self._outbox
            or self.health.are_open
            or self.device.is_busy
        )
        return self._loop.has_work or is_asked

    @property
    def wait_s(self) -> float:
        """For how long nothing will come of `step`, unless a message comes: 0 if something may, infinite when idle (but
        for sessions that run out of time)."""
        return self._waits.current_s if self.has_work else self.sessions.left_s

    @property
    def last_mode(self) -> ForwardMode | None:
        """What the last step ran, if there was one and there is work."""
        batch = self.scheduler.last_batch
        return batch.mode if batch is not None and self.has_work else None

    @property
    def num_results(self) -> int:
        """Results of steps that have come."""
        return self._loop.num_results

    @property
    def is_stopped(self) -> bool:
        return self.stop_at is not None and not self._loop.has_work

    @property
    def surroundings(self) -> dict[str, object]:
        """By name, what was handed in that nobody else looks at."""
        return {
            "runner": self._runner,
            "grammars": self._grammars,
            "report_failure": self._report_failure,
        }

    def start_over(self) -> None:
        """Forget all that was done: cache, counters, history. Only while nothing is open."""
        assert not self.has_work, "requests are open"
        self._compose(self.scheduler.settings)

    def submit(self, message: ToEngine) -> FromEngine | None:
        """Take a message in. Returns the reply if there is one at once. A message that nobody handles is dropped; one
        whose handling raises ends what it brought, and nothing else (`guard.py`)."""
        try:
            return self._handled(message)
        except EngineBroken:
            raise
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            if not isinstance(message, guard.LEAVES_BOOKS_ALONE):
                self._loop.repair()
            return guard.failed(self, message, exc)
        finally:
            self._repair()

    def _handled(self, message: ToEngine) -> FromEngine | None:
        self._waits.something_came()
        handler = HANDLERS.get(type(message))
        if handler is None:
            self.scheduler.counters.num_unknown += 1
            log.seldom("unknown_message", type=type(message).__name__)
            return None
        return answer(self, handler, message)

    def lose(self, ids: tuple[int, ...], message: str) -> None:
        """A reply that was about the requests `ids` could not be sent: they end with an error."""
        try:
            guard.lose(self, ids, message)
        finally:
            self._repair()

    def settle(self) -> None:
        """Take in all that is in flight."""
        for output in self._loop.settle():
            self._outbox += self._sifted(output)

    def step(self) -> list[FromEngine]:
        """Run one step of the loop, if there is work; answer what can be answered.

        What the scheduler or the books raise ends no more than the requests concerned. Raises EngineBroken.
        """
        replies, self._outbox = self._outbox, []
        try:
            self._turn(replies)
        except EngineBroken:
            raise
        except Exception as exc:
            self._loop.begin_anew(exc)
        self._repair()
        self._take_finished(replies)
        return replies

    def _turn(self, replies: list[FromEngine]) -> None:
        """A step. What there is to be told is added to `replies` as it comes up, so that nothing of it is lost."""
        began = self.clock()
        if self.stop_at is not None and began >= self.stop_at:
            self.scheduler.abort(Abort(all=True, message="the server is stopping"))
        warned = self._tried("grammars", lambda: grammar.look_after(self, began), None)
        if warned is not None:
            replies.append(warned)
        failures = self._num_failures
        had_work = self._loop.has_work
        is_held = self.pause.mode is not None or not self.device.is_free
        ended = self.device.turn(self, self._runner)
        replies += self._take_outbox()
        output = self._loop.rest() if is_held else self._loop.step()
        self._repair()
        if is_held and self.pause.mode is None:
            self.scheduler.note_device_is_busy()
        if output is not None:
            replies += self._sifted(output)
        replies += ended  # behind what was computed before
        if failures == self._num_failures:
            self._failures_in_a_row = 0
        if self.flushes:
            replies += self._tried("the flush of the cache", lambda: answer_flushes(self), [])
        now = self.clock()
        self._tried("sessions", lambda: look_after(self.sessions, self.scheduler, now), None)
        if self.health.are_open:
            results = self.num_results
            replies += self._tried(
                "health checks",
                lambda: self.health.answers(self.scheduler, results, now, is_paused=is_held),
                list[HealthCheckReply](),
            )
        if (
            self.audits
            or not self._auditor.balance()
            or (not self._loop.has_work and self._auditor.is_due(now))
        ):
            self._audit(now, replies)
        self._waits.stepped(self, now, is_stuck=self._loop.is_stuck and not replies)
        if had_work:
            self._busy_s += now - began
            if now - self._stats_at >= STATS_INTERVAL_S or not self._loop.has_work:
                self._stats_at = now
                replies.append(self.stats())

    def _tried(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """What `work`, which belongs to no request, gives; `otherwise` if it raises. That is counted, and the first
        time it is logged with its traceback: it may go on with every step. Calls that wait for it wait on."""
        try:
            return work()
        except Exception as exc:
            if what in self._failing:
                self.scheduler.counters.num_failed += 1
                log.seldom("step_failed", what=what, error=type(exc).__name__)
            else:
                self._failing.add(what)
                self.scheduler.is_in_doubt = True  # not each time: nobody would ever get on
                guard.note(self, what, exc)
            return otherwise

    def _repair(self) -> None:
        """Begin the books anew if something was left half way; report what was raised when a request ended."""
        if self.scheduler.is_in_doubt:
            self._loop.repair()
        for fault in self.scheduler.take_faults():
            self._on_fault(fault)

    def _sifted(self, output: StepOutput) -> list[FromEngine]:
        """What of an output is for others than the engine itself."""
        rest, answers = self.health.sifted(output)
        return [*answers] if rest is None else [rest, *answers]

    def _audit(self, now: float, replies: list[FromEngine]) -> None:
        """Examine the books; answer who has asked for it."""
        self.settle()
        self._repair()
        replies += self._take_outbox()
        faults = self._auditor.audit(now)
        calls, self.audits = self.audits, []
        self._take_finished(replies)  # requests that a fault has ended
        replies += [self._auditor.reply(call, faults) for call in calls]

    def _take_outbox(self) -> list[FromEngine]:
        taken, self._outbox = self._outbox, []
        return taken

    def _take_finished(self, replies: list[FromEngine]) -> None:
        """Add what is to be told of requests, though no step has brought it."""
        output = self.scheduler.take_output()
        if output is not None:
            replies += self._sifted(output)

    def stats(self) -> Stats:
        return msgspec.structs.replace(
            self.scheduler.stats(),
            max_running_requests=self.scheduler.settings.max_running_requests,
            busy_s=self._busy_s,
            num_sessions=len(self.sessions),
            num_grammar_queue=len(self.grammar.queue),
            total_grammars=self.grammar.num_asked,
            total_grammar_hits=self.grammar.num_hits,
            total_grammar_refused=self.grammar.num_refused,
            total_forced_tokens=self.grammar.num_forced,
        )

    def _on_fault(self, exc: Exception) -> None:
        """The scheduler raised. Other than a device that fails, that need not be told by the next step: who brings the
        fault with him is ended when it comes again."""
        self._report_failure(exc)
        self.scheduler.counters.num_faults += 1

    def _on_failure(self, exc: Exception) -> None:
        self._report_failure(exc)
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(
                f"{self._failures_in_a_row} steps failed in a row, the last with: {exc}"
            ) from exc

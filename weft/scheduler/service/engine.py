"""Scheduler, loop and control handlers as one object: submit messages, step, send what comes out.

Used by the engine process and, in one process, by `weft.LLM`. Knows no socket and no tensor: the runner and the clock
are handed in.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.executor.plan import ForwardMode, Runner
from weft.grammar.protocol import Grammars, NoGrammars
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import Stats
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort
from weft.observe.log import EventLog
from weft.scheduler.counters import Counters
from weft.scheduler.loop import Loop
from weft.scheduler.part import Part
from weft.scheduler.parts.allowed import Allowed
from weft.scheduler.parts.bad_words import BadWords
from weft.scheduler.parts.bias import Bias
from weft.scheduler.parts.grammar import GrammarPart
from weft.scheduler.parts.hidden import HiddenStatesPart
from weft.scheduler.parts.logprobs import LogprobsPart
from weft.scheduler.parts.penalties import PenaltiesPart
from weft.scheduler.parts.pooling import PoolingPart
from weft.scheduler.parts.processors import LogitProcessors
from weft.scheduler.parts.prompt_logprobs import PromptLogprobsPart
from weft.scheduler.parts.sessions import Sessions
from weft.scheduler.parts.thinking import ThinkingBudget
from weft.scheduler.parts.vectors import VectorsPart
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.service import grammar
from weft.scheduler.service.blocker import Alone, Barrier, InputBlocker, InputState
from weft.scheduler.service.books import Books
from weft.scheduler.service.control import DISPATCHER, answer_flushes
from weft.scheduler.service.device import Device
from weft.scheduler.service.health import HealthChecks
from weft.scheduler.service.pause import Pause
from weft.scheduler.service.processors import NoProcessors, Processors
from weft.scheduler.service.profile import NoProfiler, Profiler
from weft.scheduler.service.sessions import look_after
from weft.scheduler.service.waits import Waits
from weft.scheduler.settings import SchedulerSettings

STATS_INTERVAL_S = 1.0
MAX_FAILURES_IN_A_ROW = 3

log = EventLog("engine")


class EngineBroken(RuntimeError):
    """The device failed on several steps in a row: there is no point in going on."""


class Engine:
    """`overlap` is how many steps are planned while one runs: none (False), one (True), or more.

    `on_failure` is told of each exception that a step raised.
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
        barrier: Barrier | None = None,
        grammars: Grammars | None = None,
        processors: Processors | None = None,
    ) -> None:
        self.depth = int(overlap)
        self.clock = clock
        self.flushes: list[tuple[float, int]] = []  # deadline and call of cache flushes that wait for an idle engine
        self.audits: list[int] = []  # calls of audits that are to be made
        self.stop_at: float | None = None  # when open requests are aborted and the engine ends
        self.min_step_s = 0.0  # that whoever calls `step` lets pass from one to the next
        self.profiler = profiler or NoProfiler()
        self.input = InputBlocker(barrier or Alone())
        self.pause = Pause()
        self.device = Device()
        self.health = HealthChecks()
        self._outbox: list[FromEngine] = []  # what came up between two steps
        self._waits = Waits()
        self._report_failure = on_failure
        self._failures_in_a_row = 0
        self._num_failures = 0
        self._stats_at = 0.0
        self._busy_s = 0.0
        self._runner = runner
        self._grammars = grammars or NoGrammars("this engine compiles no grammars")
        self.processors = processors or NoProcessors()
        self._compose(settings, Counters(), 0)

    def _compose(self, settings: SchedulerSettings, counters: Counters, first_step: int) -> None:
        self.sessions = Sessions(settings.sessions)
        self.vectors = VectorsPart(settings.hidden_size)
        self.grammar = GrammarPart(self._grammars, settings.eos_token_ids)
        parts: list[Part] = [
            *(Bias(settings.eos_token_ids), PenaltiesPart(), LogprobsPart(), PromptLogprobsPart()),
            *(HiddenStatesPart(), self.vectors, PoolingPart()),
            *(Allowed(settings.vocab_size), BadWords(), ThinkingBudget(), LogitProcessors()),
            *(self.sessions, self.grammar),
        ]
        self.scheduler = Scheduler(settings, parts, counters=counters, first_step=first_step)
        self._books = Books(self.scheduler)
        self._loop = Loop(self.scheduler, self._runner, clock=self.clock, depth=self.depth, on_failure=self._on_failure)

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called without waiting for a message."""
        is_asked = bool(self.flushes or self.audits or self._outbox or self.health.are_open or self.device.is_busy)
        return self._loop.has_work or is_asked or self.input.state is InputState.GLOBAL_UNBLOCK_BARRIER

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
    def can_start_over(self) -> bool:
        """Whether nothing is open and nothing is remembered that the future depends on, but for the cache."""
        is_sound = not self._failures_in_a_row and not self.scheduler.kv.allocator.quarantined
        is_open = self.input.state is InputState.UNBLOCKED and self.pause.mode is None and self.device.is_free
        return is_sound and is_open and not self.has_work and self.stop_at is None and not len(self.sessions)

    def start_over(self, counters: Counters | None = None, first_step: int | None = None) -> None:
        """Begin anew with an empty cache. Only when `can_start_over`.

        Counters, step numbers and diary go on, unless `counters` are given: then nothing is remembered of what was
        before. What is decided from here on follows from what comes from here on: a replay can begin here.
        """
        assert self.can_start_over
        before = self.scheduler
        step = before.num_steps if first_step is None else first_step
        self._compose(before.settings, before.counters if counters is None else counters, step)
        if counters is None:
            self.scheduler.diary = before.diary

    def submit(self, message: ToEngine) -> FromEngine | None:
        """Take a message in. Returns the reply if there is one at once. A message that nobody handles is dropped."""
        self._waits.something_came()
        handler = DISPATCHER.find(type(message))
        if handler is None:
            self.scheduler.counters.num_unknown += 1
            log.seldom("unknown_message", type=type(message).__name__)
            return None
        return handler(self, message)

    def settle(self) -> None:
        """Take in all that is in flight."""
        for output in self._loop.settle():
            self._outbox += self._sifted(output)

    def step(self) -> list[FromEngine]:
        """Run one step of the loop, if there is work; answer what can be answered."""
        began = self.clock()
        if self.stop_at is not None and began >= self.stop_at:
            self.scheduler.abort(Abort(all=True, message="the server is stopping"))
        self.input.poll(self.scheduler, began)
        replies, self._outbox = self._outbox, []
        if (warned := grammar.look_after(self, began)) is not None:
            replies.append(warned)
        failures = self._num_failures
        had_work = self._loop.has_work
        is_held = self.pause.mode is not None or not self.device.is_free
        ended = self.device.turn(self, self._runner)
        output = self._loop.rest() if is_held else self._loop.step()
        if output is not None:
            replies += self._sifted(output)
        replies += ended  # behind what was computed before
        if failures == self._num_failures:
            self._failures_in_a_row = 0
        if self.flushes:
            replies += answer_flushes(self)
        now = self.clock()
        look_after(self.sessions, self.scheduler, now)
        if self.health.are_open:
            replies += self.health.answers(self.scheduler, self.num_results, now, is_paused=is_held)
        if self.audits or not self._books.balance() or (not self._loop.has_work and self._books.is_due(now)):
            replies += self._audit(now)
        self._waits.stepped(self, now, is_stuck=self._loop.is_stuck and not replies)
        if had_work:
            self._busy_s += now - began
            if now - self._stats_at >= STATS_INTERVAL_S or not self._loop.has_work:
                self._stats_at = now
                replies.append(self.stats())
        return replies

    def _sifted(self, output: StepOutput) -> list[FromEngine]:
        """What of an output is for others than the engine itself."""
        rest, answers = self.health.sifted(output)
        return [*answers] if rest is None else [rest, *answers]

    def _audit(self, now: float) -> list[FromEngine]:
        """Examine the books; answer who has asked for it."""
        self.settle()
        replies, self._outbox = self._outbox, []
        faults = self._books.examine(now)
        calls, self.audits = self.audits, []
        output = self.scheduler.take_finished()  # of requests that a fault has ended
        if output is not None:
            replies += self._sifted(output)
        return [*replies, *(self._books.reply(call, faults) for call in calls)]

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

    def _on_failure(self, exc: Exception) -> None:
        self._report_failure(exc)
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(f"{self._failures_in_a_row} steps failed in a row, the last with: {exc}") from exc

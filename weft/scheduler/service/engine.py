"""Scheduler, loop and control handlers as one object: submit messages, step, send what comes out.

Used by the engine process and, in one process, by `weft.LLM`. Knows no socket and no tensor: the runner and the clock
are handed in.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from weft.executor.plan import Runner
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import Stats
from weft.messages.requests import Abort
from weft.scheduler.counters import Counters
from weft.scheduler.loop import Loop
from weft.scheduler.part import Part
from weft.scheduler.parts.bias import Bias
from weft.scheduler.parts.logprobs import LogprobsPart
from weft.scheduler.parts.penalties import PenaltiesPart
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.service.books import Books
from weft.scheduler.service.control import HANDLERS, answer_flushes
from weft.scheduler.settings import SchedulerSettings

STATS_INTERVAL_S = 1.0
MAX_FAILURES_IN_A_ROW = 3


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
    ) -> None:
        self.depth = int(overlap)
        self.clock = clock
        self.flushes: list[tuple[float, int]] = []  # deadline and call of cache flushes that wait for an idle engine
        self.audits: list[int] = []  # calls of audits that are to be made
        self.stop_at: float | None = None  # when open requests are aborted and the engine ends
        self._report_failure = on_failure
        self._failures_in_a_row = 0
        self._num_failures = 0
        self._stats_at = 0.0
        self._busy_s = 0.0
        self._runner = runner
        self._compose(settings, Counters(), 0)

    def _compose(self, settings: SchedulerSettings, counters: Counters, first_step: int) -> None:
        parts: list[Part] = [Bias(settings.eos_token_ids), PenaltiesPart(), LogprobsPart()]
        self.scheduler = Scheduler(settings, parts, counters=counters, first_step=first_step)
        self._books = Books(self.scheduler)
        self._loop = Loop(self.scheduler, self._runner, clock=self.clock, depth=self.depth, on_failure=self._on_failure)

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called without waiting for a message."""
        return self._loop.has_work or bool(self.flushes) or bool(self.audits)

    @property
    def is_stopped(self) -> bool:
        return self.stop_at is not None and not self._loop.has_work

    @property
    def can_start_over(self) -> bool:
        """Whether nothing is open and nothing is remembered that the future depends on, but for the cache."""
        is_sound = not self._failures_in_a_row and not self.scheduler.kv.allocator.quarantined
        return is_sound and not self.has_work and self.stop_at is None

    def start_over(self, counters: Counters | None = None, first_step: int | None = None) -> None:
        """Begin anew with an empty cache; counters and step numbers go on. Only when `can_start_over`.

        What is decided from here on follows from what comes from here on: a replay can begin here, with its `counters`.
        """
        assert self.can_start_over
        before = self.scheduler
        self._compose(
            before.settings,
            before.counters if counters is None else counters,
            before.num_steps if first_step is None else first_step,
        )
        self.scheduler.diary = before.diary

    def submit(self, message: ToEngine) -> FromEngine | None:
        """Take a message in. Returns the reply if there is one at once."""
        return HANDLERS[type(message)](self, message)

    def step(self) -> list[FromEngine]:
        """Run one step of the loop, if there is work; answer what can be answered."""
        began = self.clock()
        if self.stop_at is not None and began >= self.stop_at:
            self.scheduler.abort(Abort(all=True, message="the server is stopping"))
        replies: list[FromEngine] = []
        failures = self._num_failures
        had_work = self._loop.has_work
        output = self._loop.step()
        if output is not None:
            replies.append(output)
        if failures == self._num_failures:
            self._failures_in_a_row = 0
        if self.flushes:
            replies += answer_flushes(self)
        now = self.clock()
        if self.audits or not self._books.balance() or (not self._loop.has_work and self._books.is_due(now)):
            replies += self._audit(now)
        if had_work:
            self._busy_s += now - began
            if now - self._stats_at >= STATS_INTERVAL_S or not self._loop.has_work:
                self._stats_at = now
                replies.append(self.stats())
        return replies

    def _audit(self, now: float) -> list[FromEngine]:
        """Examine the books; answer who has asked for it."""
        replies: list[FromEngine] = list(self._loop.settle())
        faults = self._books.examine(now)
        calls, self.audits = self.audits, []
        output = self.scheduler.take_finished()  # of requests that a fault has ended
        if output is not None:
            replies.append(output)
        return [*replies, *(self._books.reply(call, faults) for call in calls)]

    def stats(self) -> Stats:
        return msgspec.structs.replace(self.scheduler.stats(), busy_s=self._busy_s)

    def _on_failure(self, exc: Exception) -> None:
        self._report_failure(exc)
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(f"{self._failures_in_a_row} steps failed in a row, the last with: {exc}") from exc

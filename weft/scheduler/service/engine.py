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
from weft.scheduler.loop import Loop
from weft.scheduler.part import Part
from weft.scheduler.parts.bias import Bias
from weft.scheduler.parts.logprobs import LogprobsPart
from weft.scheduler.parts.penalties import PenaltiesPart
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.service.control import HANDLERS, answer_flushes
from weft.scheduler.settings import SchedulerSettings

STATS_INTERVAL_S = 1.0
MAX_FAILURES_IN_A_ROW = 3


class EngineBroken(RuntimeError):
    """The device failed on several steps in a row: there is no point in going on."""


class Engine:
    """`overlap` plans a step while the last one runs; `on_failure` is told of each exception that a step raised."""

    def __init__(
        self,
        settings: SchedulerSettings,
        runner: Runner,
        *,
        clock: Callable[[], float],
        overlap: bool,
        on_failure: Callable[[Exception], None],
    ) -> None:
        parts: list[Part] = [Bias(settings.eos_token_ids), PenaltiesPart(), LogprobsPart()]
        self.scheduler = Scheduler(settings, parts)
        self.clock = clock
        self.flushes: list[tuple[float, int]] = []  # deadline and call of cache flushes that wait for an idle engine
        self.stop_at: float | None = None  # when open requests are aborted and the engine ends
        self._report_failure = on_failure
        self._failures_in_a_row = 0
        self._num_failures = 0
        self._stats_at = 0.0
        self._busy_s = 0.0
        self._loop = Loop(self.scheduler, runner, clock=clock, depth=int(overlap), on_failure=self._on_failure)

    @property
    def has_work(self) -> bool:
        """Whether `step` should be called without waiting for a message."""
        return self._loop.has_work or bool(self.flushes)

    @property
    def is_stopped(self) -> bool:
        return self.stop_at is not None and not self._loop.has_work

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
        if had_work:
            self._busy_s += now - began
            if now - self._stats_at >= STATS_INTERVAL_S or not self._loop.has_work:
                self._stats_at = now
                replies.append(self.stats())
        return replies

    def stats(self) -> Stats:
        return msgspec.structs.replace(self.scheduler.stats(), busy_s=self._busy_s)

    def _on_failure(self, exc: Exception) -> None:
        self._report_failure(exc)
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(f"{self._failures_in_a_row} steps failed in a row, the last with: {exc}") from exc

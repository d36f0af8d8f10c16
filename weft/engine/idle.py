"""How long the caller of `Engine.step` may sleep before the next call.

    the step found something to do     ─▶ not at all
    open requests, none of them can go ─▶ until a deadline; less if something must be asked again
    no work                            ─▶ until a service wants to wake (a session runs out of time)

A message ends any sleep, and so does the wake-up pipe, when a grammar is ready. What can only be
asked again (parts of the scheduler that say "not yet", a job of the device) is asked soon at first
and then ever more rarely, up to `LONGEST_S`: a short wait is not late then, and a long one costs
next to nothing.
"""

from __future__ import annotations

import math

from weft.engine.core import EngineCore
from weft.engine.grammar_service import GrammarService
from weft.engine.hooks import SOON, Service

SHORTEST_S = 0.001
LONGEST_S = 0.02  # between two questions


class Idle(Service):
    """Always attached. It looks at a step when its replies are complete."""

    name = "the wait for work"

    def __init__(self, core: EngineCore, grammars: GrammarService) -> None:
        self._core = core
        self._grammars = grammars
        self.wait_s = math.inf  # the caller may sleep so long
        self.min_step_s = 0.0  # the caller lets so much time pass from one step to the next
        self._patience_s = SHORTEST_S  # until the next question

    def wake(self) -> None:
        """The next step may find something to do: a message has come."""
        self.wait_s = 0.0
        self._patience_s = SHORTEST_S

    def after_step(self, now: float) -> None:
        core = self._core
        has_work = core.loop.has_work or core.hooks.has_work
        is_stuck = core.loop.is_stuck and not core.outbox
        if not has_work:
            self.wait_s = max(self._wake_at(has_requests=False) - now, 0.0)
        elif is_stuck:
            self._wait_for_work(now)
        else:
            self.wake()

    def _wait_for_work(self, now: float) -> None:
        wake_at = self._wake_at(has_requests=True)
        if not self._must_ask():
            self.wait_s = max(wake_at - now, SHORTEST_S)
            return
        # Twice as long each time: 1, 2, 4, 8, 16, 20, 20 ... ms.
        self.wait_s = min(max(wake_at - now, SHORTEST_S), self._patience_s)
        self._patience_s = min(2 * self._patience_s, LONGEST_S)

    def _wake_at(self, *, has_requests: bool) -> float:
        """When something is to be done without a message, as far as that is known."""
        wake_at = math.inf
        # The heap of deadlines may still have those of requests that have ended.
        if has_requests:
            wake_at = self._core.scheduler.deadlines.next_s
        for service in self._core.hooks.attached:
            at = service.wake_at()
            if at != SOON:
                wake_at = min(wake_at, at)
        return wake_at

    def _must_ask(self) -> bool:
        """Whether only another step can tell if there is something to do."""
        core = self._core
        if any(service.wake_at() == SOON for service in core.hooks.attached):
            return True
        if core.hooks.holds_steps:
            return False  # the queue is not looked at
        queue = core.scheduler.waiting_queue
        num_compiling = len(self._grammars.feature.queue)  # their grammars wake the engine
        return queue.has_candidates and len(queue) > num_compiling

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
from collections.abc import Mapping, Sequence

from weft.engine.core import EngineCore
from weft.engine.hooks import SOON

SHORTEST_S = 0.001
NUM_DOUBLINGS = 5  # of a wait that is in vain
LONGEST_S = 0.02  # between two questions


class Idle:
    """It is asked by the caller of `Engine.step`, and computes only then: a step does not visit it.

    What it reads is of the last step's end, not of the clock, so a journal need not record when it
    was asked.
    """

    def __init__(self, core: EngineCore, held: Sequence[Mapping[int, object]]) -> None:
        """`held`: requests that wait for what wakes the engine, by their ids: their grammars, or
        their KV."""
        self._core = core
        self._held = held
        self.min_step_s = 0.0  # the caller lets so much time pass from one step to the next

    @property
    def wait_s(self) -> float:
        """The caller may sleep so long; infinite: until a message comes."""
        core = self._core
        if core.has_news:
            return 0.0
        if not core.loop.has_work and not core.hooks.has_work:
            return max(self._wake_at(has_requests=False) - core.ended_s, 0.0)
        if not core.loop.num_stuck or core.has_sent:
            return 0.0
        wait_s = max(self._wake_at(has_requests=True) - core.ended_s, SHORTEST_S)
        if not self._must_ask():
            return wait_s
        # Twice as long each time: 1, 2, 4, 8, 16, 20, 20 ... ms.
        num_in_vain = min(core.loop.num_stuck - 1, NUM_DOUBLINGS)
        return min(wait_s, SHORTEST_S * (1 << num_in_vain), LONGEST_S)

    def _wake_at(self, *, has_requests: bool) -> float:
        """When something is to be done without a message, as far as that is known."""
        wake_at = math.inf
        # The heap of deadlines may still have those of requests that have ended.
        if has_requests:
            wake_at = self._core.scheduler.limits.deadlines.next_s
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
        held: set[int] = set()
        for requests in self._held:
            held.update(requests)
        return queue.has_candidates and len(queue) > len(held)

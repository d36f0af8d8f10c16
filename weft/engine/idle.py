"""How long the caller of `Engine.step` may sleep before the next call.

    the step found work                ─▶ not at all
    open requests, none of them can go ─▶ until a deadline; less if a state must be polled
    no work                            ─▶ until a service has work (a session times out)

A message ends any sleep, and so does the wake-up pipe when a grammar is ready. States that must be
polled (features that say "not yet", a job of the device) are polled often at first and then less
and less often, up to every `LONGEST_S`: so a short wait ends in time, and a long one costs almost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.engine.core import EngineCore
from weft.engine.hooks import SOON

SHORTEST_S = 0.001
NUM_DOUBLINGS = 5  # of the sleep between polls without a result
LONGEST_S = 0.02  # between two polls


class Idle:
    """The caller of `Engine.step` asks it, and it computes only then: a step does not visit it.

    It reads the times of the last step, not the clock, so a journal need not record the calls.
    """

    def __init__(self, core: EngineCore, blocked: Sequence[Mapping[int, object]]) -> None:
        """`blocked`: requests that wait for an event that wakes the engine, by id: for their
        grammars, or for their KV."""
        self._core = core
        self._blocked = blocked
        self.min_step_s = 0.0  # the time that the caller must let pass from one step to the next

    @property
    def wait_s(self) -> float:
        """How long the caller may sleep; infinite: until a message comes."""
        core = self._core
        if core.has_news:
            return 0.0
        if not core.loop.has_work and not core.hooks.working:
            return max(self._wake_at(has_requests=False) - core.ended_s, 0.0)
        if not core.loop.num_stuck or core.has_sent:
            return 0.0
        wait_s = max(self._wake_at(has_requests=True) - core.ended_s, SHORTEST_S)
        if not self._must_ask():
            return wait_s
        # Doubles each time: 1, 2, 4, 8, 16, 20, 20 ... ms.
        num_in_vain = min(core.loop.num_stuck - 1, NUM_DOUBLINGS)
        return min(wait_s, SHORTEST_S * (1 << num_in_vain), LONGEST_S)

    def _wake_at(self, *, has_requests: bool) -> float:
        """When there will be work without a message, as far as known."""
        wake_at = math.inf
        # The heap of deadlines may have deadlines of requests that have ended.
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
            return False  # the queue is not read
        queue = core.scheduler.waiting_queue
        blocked: set[int] = set()
        for requests in self._blocked:
            blocked.update(requests)
        return queue.next_line is not None and len(queue) > len(blocked)

"""A line of the log for each step that computes prompts, while the level of the log is debug: what
the step takes in, and what is left. The sums of all lines are the counters of `/metrics`.
"""

from __future__ import annotations

import logging

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.observe.log import EventLog

log = EventLog("engine")


class PrefillLog(Service):
    """Attached while lines of the level debug are logged."""

    name = "the log of prefills"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_steps = 0
        self._num_tokens = 0
        self._num_cached = 0

    def follow_level(self) -> None:
        """The level of the log may have changed."""
        if not log.is_enabled_for(logging.DEBUG):
            self._core.hooks.detach(self)
            return
        self._note()
        self._core.hooks.attach(self)

    def after_step(self, now: float) -> None:
        scheduler = self._core.scheduler
        counters = scheduler.counters
        batch = scheduler.last_batch
        if counters.steps.num_prefill == self._num_steps or batch is None:
            return
        num_left = 0
        for request in scheduler.prefills.open_prompts():
            num_left += request.fill_len - request.kv_len
        log.debug(
            "prefill",
            step=batch.plan.step,
            requests=len(batch.prefills),
            new_tokens=counters.num_prefilled_tokens - self._num_tokens,
            cached_tokens=counters.num_cached_tokens - self._num_cached,
            left_tokens=num_left,
            running=len(scheduler.running_batch.rows),
            queue=len(scheduler.waiting_queue),
            max_prefill_tokens=scheduler.settings.max_prefill_tokens,
            free_tokens=scheduler.kv.room.available,
            new_token_ratio=scheduler.prefills.new_token_ratio.current,
        )
        self._note()

    def _note(self) -> None:
        counters = self._core.scheduler.counters
        self._num_steps = counters.steps.num_prefill
        self._num_tokens = counters.num_prefilled_tokens
        self._num_cached = counters.num_cached_tokens

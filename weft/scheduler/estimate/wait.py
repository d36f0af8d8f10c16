"""Estimates when waiting requests will have their first tokens, from the measured cost of steps.

It simulates the queue in its order (`play.py`). It changes no state and reads no clock. `band.py`
learns from its errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from itertools import islice

from weft.scheduler.estimate.play import Play, PlayedPrompt
from weft.scheduler.estimate.seen import OutputsSeen
from weft.scheduler.history import Counters
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.waiting.queue import WaitingQueue

# Requests that are simulated; later ones are assumed to go as fast. Each takes about 15 us before
# the step in which a request with a deadline arrives; under `fair` about 7 us more.
MAX_PLAYED = 256
MAX_COUNTED = 512  # positions of the order that are searched; a later request counts as the last


class WaitEstimator:
    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        kv: KvMemory,
        queue: WaitingQueue,
        pace: Pace,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._kv = kv
        self._queue = queue
        self._pace = pace
        self._counters = counters
        self._outputs = OutputsSeen()
        self.num_looked = 0  # requests that the last walk has looked at

    def ended(self, num_generated: int) -> None:
        """Note the length of an ended output that might have stopped at any token."""
        self._outputs.note(num_generated)

    def first_tokens_s(
        self,
        wanted: Mapping[int, float],
        now: float,
        open_prompts: list[Request],
        in_flight: StepLoad | None = None,
    ) -> dict[int, float]:
        """Seconds from now until each of these waiting requests has its first token, by their ids.

        `wanted` has the seconds after which each of them is refused: later requests then do not
        wait for it. One walk over the queue serves all of them. `open_prompts` are computed in
        part; `in_flight` is a step that has just begun. A request is left out if the cost of steps
        is not known yet.
        """
        self.num_looked = 0
        cost = self._pace.model()
        if cost is None:
            return {}
        play = Play(self._settings, self._kv, cost, self._outputs)
        play.begin(
            open_prompts,
            num_waiting=len(self._queue) + len(open_prompts),
        )
        if in_flight is not None:
            play.now_s = cost.seconds(in_flight)
        # Positions in the order begin at 1.
        positions = enumerate(self._queue.order(now), start=1)
        prompts = self._prompts(wanted, islice(positions, MAX_PLAYED), open_prompts)
        times = play.first_tokens(prompts, len(wanted))
        later = wanted.keys() - times.keys()
        if later and play.num_admitted:
            each_s = play.now_s / play.num_admitted
            for id, position in self._positions(later, positions).items():
                times[id] = position * each_s
        return times

    def alone_s(self, request: Request) -> float | None:
        """Seconds of a step that computes only the rest of this prompt. None if the cost of steps
        is not known yet."""
        cost = self._pace.model()
        if cost is None:
            return None
        cached = self._cached_len(request, exactly=True)
        num_tokens = request.fill_len - cached
        return cost.seconds(StepLoad(num_tokens, num_tokens * (cached + request.fill_len) // 2))

    def _positions(
        self,
        wanted: Set[int],
        positions: Iterator[tuple[int, Request]],
    ) -> dict[int, int]:
        """Positions in the order of requests that were not simulated, or the queue's length."""
        found = dict.fromkeys(wanted, len(self._queue))
        num_left = len(found)
        for position, request in islice(positions, MAX_COUNTED - MAX_PLAYED):
            self.num_looked += 1
            if request.id in found:
                found[request.id] = position
                num_left -= 1
                if not num_left:
                    break
        return found

    def _prompts(
        self,
        wanted: Mapping[int, float],
        positions: Iterator[tuple[int, Request]],
        open_prompts: list[Request],
    ) -> Iterator[PlayedPrompt]:
        """The prompts to compute, in order."""
        for prompt in open_prompts:
            yield PlayedPrompt(prompt, prompt.kv_len, has_row=True)
        for _, request in positions:
            self.num_looked += 1
            latest_s = wanted.get(request.id)
            is_wanted = latest_s is not None
            yield PlayedPrompt(
                request,
                self._cached_len(request, exactly=is_wanted),
                is_wanted=is_wanted,
                latest_s=math.inf if latest_s is None else latest_s,
            )

    def _cached_len(
        self,
        request: Request,
        *,
        exactly: bool,
    ) -> int:
        """Tokens of the request that need not be computed; if not `exactly`, as far as known, or
        the mean of past requests."""
        known = max(request.prefix.length, request.kv_len)
        if exactly:
            cached = self._kv.cache.peek(request.cache_key(request.packed))
            known = max(known, cached)
        elif not known and self._counters.num_prompt_tokens:
            part = self._counters.num_cached_tokens / self._counters.num_prompt_tokens
            known = int(part * request.fill_len)
        # The last token is computed in any case.
        return min(known, request.fill_len - 1)

"""When a waiting request will have its first token, from what steps have cost so far.

The queue is played through in its order (`play.py`), with the measured cost of a step. It changes
nothing and reads no clock. Whether it is right is learnt elsewhere (`band.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from weft.scheduler.estimate.outputs import OutputsSeen
from weft.scheduler.estimate.play import Play, PlayedPrompt
from weft.scheduler.history import Counters
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import Pace
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.request import Request
from weft.scheduler.settings import SchedulerSettings

# Requests; those behind them are taken to go as fast. Each takes some 15 us of the step before
# which a request with a deadline has come; under `fair` some 7 more.
MAX_PLAYED = 256
MAX_COUNTED = 512  # whose places are looked for; who stands behind them counts as the last


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

    def ended(self, num_generated: int) -> None:
        """A request that might have stopped at any token has generated so many."""
        self._outputs.note(num_generated)

    def first_token_s(
        self,
        request: Request,
        now: float,
        open_prompts: list[Request],
        in_flight: StepLoad | None = None,
    ) -> float | None:
        """Seconds from now until a waiting request has its first token.

        `open_prompts` are computed in part; `in_flight` is a step that has just begun. None: nobody
        knows yet what steps cost.
        """
        cost = self._pace.model()
        if cost is None:
            return None
        play = Play(self._settings, self._kv, cost, self._outputs)
        play.begin(open_prompts, num_waiting=len(self._queue) + len(open_prompts))
        if in_flight is not None:
            play.now_s = cost.seconds(in_flight)
        # Each has its place in the order, from 1 on.
        places = enumerate(self._queue.order(now), start=1)
        prompts = self._prompts(request, islice(places, MAX_PLAYED), open_prompts)
        if play.until_first_token(prompts):
            return play.now_s
        if not play.num_admitted:
            return None
        return play.now_s * self._place(request, places) / play.num_admitted

    def _place(self, wanted: Request, places: Iterator[tuple[int, Request]]) -> int:
        """How many requests go before it, and itself, if it is among those that were not played."""
        for place, request in islice(places, MAX_COUNTED - MAX_PLAYED):
            if request is wanted:
                return place
        return len(self._queue)

    def _prompts(
        self,
        wanted: Request,
        places: Iterator[tuple[int, Request]],
        open_prompts: list[Request],
    ) -> Iterator[PlayedPrompt]:
        """What is to be computed, in order."""
        for prompt in open_prompts:
            yield PlayedPrompt(prompt, prompt.kv_len, has_row=True)
        for _, request in places:
            is_wanted = request is wanted
            kv_len = self._cached_len(request, exactly=is_wanted)
            yield PlayedPrompt(request, kv_len, is_wanted=is_wanted)

    def _cached_len(
        self,
        request: Request,
        *,
        exactly: bool,
    ) -> int:
        """Tokens of it that need not be computed; of many, as far as that is known, or as it was
        in the mean."""
        known = max(request.prefix.length, request.kv_len)
        if exactly:
            cached = self._kv.cache.peek(request.cache_key(request.packed))
            known = max(known, cached)
        elif not known and self._counters.num_prompt_tokens:
            part = self._counters.num_cached_tokens / self._counters.num_prompt_tokens
            known = int(part * request.fill_len)
        # The last token is computed in any case.
        return min(known, request.fill_len - 1)

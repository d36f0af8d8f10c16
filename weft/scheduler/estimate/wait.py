"""When waiting requests will have their first tokens, from what steps have cost so far.

The queue is played through in its order (`play.py`), with the measured cost of a step. It changes
nothing and reads no clock. Whether it is right is learnt elsewhere (`band.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
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
# which requests with a deadline have come; under `fair` some 7 more.
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
        self.num_looked = 0  # requests that the last walk has looked at

    def ended(self, num_generated: int) -> None:
        """A request that might have stopped at any token has generated so many."""
        self._outputs.note(num_generated)

    def first_tokens_s(
        self,
        wanted: Mapping[int, float],
        now: float,
        open_prompts: list[Request],
        in_flight: StepLoad | None = None,
    ) -> dict[int, float]:
        """Seconds from now until each of these waiting requests has its first token, by their ids.

        `wanted` has the seconds after which each is refused: who stands behind it then does not
        wait for it. One walk over the queue answers for all of them. `open_prompts` are computed
        in part; `in_flight` is a step that has just begun. Who is missing in the answer: nobody
        knows yet what steps cost.
        """
        self.num_looked = 0
        cost = self._pace.model()
        if cost is None:
            return {}
        play = Play(self._settings, self._kv, cost, self._outputs)
        play.begin(open_prompts, num_waiting=len(self._queue) + len(open_prompts))
        if in_flight is not None:
            play.now_s = cost.seconds(in_flight)
        # Each has its place in the order, from 1 on.
        places = enumerate(self._queue.order(now), start=1)
        prompts = self._prompts(wanted, islice(places, MAX_PLAYED), open_prompts)
        times = play.first_tokens(prompts, len(wanted))
        behind = wanted.keys() - times.keys()
        if behind and play.num_admitted:
            each_s = play.now_s / play.num_admitted
            for id, place in self._places(behind, places).items():
                times[id] = place * each_s
        return times

    def _places(
        self,
        wanted: Set[int],
        places: Iterator[tuple[int, Request]],
    ) -> dict[int, int]:
        """How many requests go before each of those that were not played, and itself."""
        found = dict.fromkeys(wanted, len(self._queue))
        num_left = len(found)
        for place, request in islice(places, MAX_COUNTED - MAX_PLAYED):
            self.num_looked += 1
            if request.id in found:
                found[request.id] = place
                num_left -= 1
                if not num_left:
                    break
        return found

    def _prompts(
        self,
        wanted: Mapping[int, float],
        places: Iterator[tuple[int, Request]],
        open_prompts: list[Request],
    ) -> Iterator[PlayedPrompt]:
        """What is to be computed, in order."""
        for prompt in open_prompts:
            yield PlayedPrompt(prompt, prompt.kv_len, has_row=True)
        for _, request in places:
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

"""Asks the engine why requests were slow to begin, and writes a line of the log and numbers for
each.

The engine looks for the cause when it is asked, so it is asked about few: those that are slow, and
at most one in `PAUSE_S`. Requests that are not slow pay one comparison. Background requests wait
because they shall: a batch of them would crowd out the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from weft.client.calls import EngineFault
from weft.client.engine_state import EngineUnavailable
from weft.client.generation import Completion
from weft.messages.control import CacheCause, Explanation, TimePart
from weft.observe.log import EventLog
from weft.observe.metrics import MissMetrics

PAUSE_S = 0.5  # between two questions
MAX_WAITING = 64  # slow requests about which the engine is still to be asked

log = EventLog("client")
# `explained` of a client.
Ask = Callable[..., Awaitable[list[Explanation]]]


class SlowRequest(NamedTuple):
    rid: str
    number: int
    first_s: float  # from its arrival to its first token


class SlowRequests:
    """`longest_s`: from arrival to first token; what takes longer is slow."""

    def __init__(self, ask: Ask, metrics: MissMetrics, longest_s: float) -> None:
        self._ask = ask
        self._metrics = metrics
        self._longest_s = longest_s
        self._waiting: deque[SlowRequest] = deque(maxlen=MAX_WAITING)
        self._work: asyncio.Task[None] | None = None

    def note(self, completion: Completion, now: float) -> None:
        """A completion has ended."""
        spec = completion.spec
        first_s = (completion.first_token_at or now) - spec.arrived_s
        if first_s < self._longest_s or spec.request.background:
            return
        self._waiting.append(SlowRequest(spec.request.rid, spec.request.id, first_s))
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._ask_all())

    async def _ask_all(self) -> None:
        try:
            while self._waiting:
                await self._explain(self._waiting.popleft())
                await asyncio.sleep(PAUSE_S)
        finally:
            self._work = None

    async def _explain(self, slow: SlowRequest) -> None:
        try:
            found = await self._ask(slow.rid, number=slow.number)
        except (EngineUnavailable, EngineFault):
            return
        for one in found:
            self._tell(one.rid, slow.first_s, one.cache_cause, one.times)

    def _tell(
        self, rid: str, first_s: float, cause: CacheCause | None, times: list[TimePart]
    ) -> None:
        name = "-"
        missed_tokens = 0
        missed_s = 0.0
        advice = "-"
        if cause is not None:
            name = cause.cause
            missed_tokens = cause.missed_tokens
            missed_s = cause.missed_s or 0.0
            advice = cause.advice or "-"
            self._metrics.count(name, missed_tokens, missed_s)
        longest = max(times, key=_seconds, default=None)
        log.info(
            "slow",
            rid=rid,
            first_token_s=first_s,
            cache_cause=name,
            missed_tokens=missed_tokens,
            missed_s=missed_s,
            most_in="-" if longest is None else longest.part,
            most_s=0.0 if longest is None else longest.seconds,
            advice=advice,
        )


def _seconds(part: TimePart) -> float:
    return part.seconds

"""The client's record of its engine: whether it is ready and answers, and its numbers.

    EngineState        its description, its latest numbers, its weights
    HangDetector       whether it hangs, judged from its messages

`EngineClient` writes this state from the engine's messages; all others only read it. This module
does not know the consequence of a hang, which the launcher decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from weft.messages.status import EngineReady, Heartbeat, Stats
from weft.messages.weights import FIRST_VERSION, WeightsReply
from weft.observe.engine_numbers import EngineNumbers
from weft.observe.metrics import Metrics

TICK_S = 0.5
LATE_S = 0.25  # a later tick was delayed by a busy machine
HANG_AFTER_S = 4.0
# However busy the machine is, a tick counts at least this part of itself.
LEAST_COUNTED = 1 / 20


class EngineLoad(Protocol):
    """The latest numbers of one engine."""

    @property
    def stats(self) -> Stats: ...

    @property
    def stats_at(self) -> float:
        """When the numbers came, on the clock `time.monotonic`."""
        ...

    @property
    def numbers(self) -> EngineNumbers:
        """The values computed from the numbers."""
        ...


class EngineUnavailable(Exception):
    """The engine is not ready yet, has stopped, or does not answer. The message is for the user."""


class EngineState:
    def __init__(self, metrics: Metrics, hang_detector: HangDetector) -> None:
        self.ready: EngineReady | None = None  # its first message
        self.lost: str | None = None  # why there is no engine any more
        self.stats = Stats()  # the latest
        self.stats_at = time.monotonic()  # when the latest numbers came
        self.weight_version = FIRST_VERSION  # of the weights in use
        self.released: list[str] = []  # memory that the engine has given back: it takes no work
        self.hang_detector = hang_detector
        self._metrics = metrics
        self._waiters: list[asyncio.Future[None]] = []  # for `ready` or `lost`

    @property
    def numbers(self) -> EngineNumbers:
        """The values computed from the latest numbers."""
        return self._metrics.engine

    @property
    def is_alive(self) -> bool:
        """Whether the engine has become ready and not stopped since."""
        return self.ready is not None and self.lost is None

    def require_ready(self) -> EngineReady:
        """The engine's own description. Raises `EngineUnavailable` if it cannot take work."""
        if self.lost is not None:
            raise EngineUnavailable(f"the engine has stopped: {self.lost}")
        if self.ready is None:
            raise EngineUnavailable("the engine is not ready yet")
        hang = self.hang_detector.hang
        if hang:
            raise EngineUnavailable(hang)
        return self.ready

    async def wait_ready(self) -> EngineReady:
        """Wait until the engine is ready. Raises `EngineUnavailable` if it fails before."""
        while self.ready is None and self.lost is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self.require_ready()

    def mark_ready(self, ready: EngineReady) -> None:
        self.ready = ready
        phases = [(phase, seconds) for phase, _, seconds in ready.startup]
        num_pages = ready.kv_tokens // ready.page_size
        self._metrics.started(phases, ready.page_size, num_pages)
        self._wake_waiters()

    def mark_lost(self, reason: str) -> None:
        """Of several reasons only the first is kept."""
        if self.lost is None:
            self.lost = reason
        self._wake_waiters()

    def record_stats(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        numbers = msgspec.structs.asdict(stats)
        self._metrics.engine.set(numbers, self.stats_at)

    def record_weights(self, reply: WeightsReply) -> None:
        self.weight_version = reply.weight_version
        self.released = reply.released

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


# ---- whether it hangs


class HangDetector:
    """Whether the engine hangs, judged from its messages.

    A thread of the engine sends heartbeats while its steps run, so a long step is not silence.

        silence      no message for `hang_after_s`: the engine's process is stopped, or none of its
                     threads can run
        standstill   heartbeats come, but for `hang_after_s` the engine has been in one step without
                     progress: it waits for an event that does not come
        endless      one step has taken `step_timeout_s`

    Time is counted in ticks of this process: the time in which this process did not run (a laptop
    asleep, a debugger) does not count. Of a tick in which the engine got only a part of the
    processor time that it wanted, only that part counts, and at least `LEAST_COUNTED`. The
    heartbeat counts the time of a standstill in the same way (`weft/launch/heartbeat.py`). So both
    are found within `hang_after_s / LEAST_COUNTED` on a machine with any load.
    """

    def __init__(self, step_timeout_s: float = 0.0, hang_after_s: float = HANG_AFTER_S) -> None:
        """`step_timeout_s`: the longest step; 0: no bound. `hang_after_s`: the longest silence or
        standstill."""
        self._step_timeout_s = step_timeout_s
        self._hang_after_s = hang_after_s
        self._silent_ticks = 0
        self._counted_ticks = 0.0  # of these, with their weights
        self._last = Heartbeat(step_s=0.0, idle_s=0.0)
        self._companions: Sequence[HangDetector] = ()
        # Why the engine is judged to hang; empty if it is not. Each request reads it, so it is
        # computed only when something changes, which is rare.
        self.hang = ""

    @property
    def is_silent(self) -> bool:
        """Whether a tick has passed since the last message."""
        return self._silent_ticks > 0

    @property
    def idle_s(self) -> float:
        """The time without progress that the engine has reported last."""
        return self._last.idle_s

    def accompany(self, companions: Sequence[HangDetector]) -> None:
        """The engine's steps wait for the engines of `companions`, and theirs for it: none of them
        stands still while another one computes."""
        self._companions = companions

    def heard(self) -> None:
        """A message has come from the engine."""
        if self._silent_ticks:
            self._silent_ticks = 0
            self._counted_ticks = 0.0
            self._judge()

    def beat(self, beat: Heartbeat) -> None:
        self._last = beat
        self._judge()

    def tick(self, passed_s: float = TICK_S, *, processor_share: float = 1.0) -> None:
        """Another `TICK_S` is over; it really took `passed_s`.

        `processor_share`: the part that the engine got of the processor time that it wanted.
        """
        weight = max(processor_share, LEAST_COUNTED)
        if passed_s > TICK_S + LATE_S:  # this process lacks a processor, too
            weight = LEAST_COUNTED
        self._silent_ticks += 1
        self._counted_ticks += weight
        self._judge()

    def declare(self, reason: str) -> None:
        """Set the verdict from another judge that does not call `tick`. `reason`: why the engine
        takes no requests; empty if it takes them."""
        self.hang = reason

    def _judge(self) -> None:
        self.hang = self._find_hang()

    def _find_hang(self) -> str:
        if round(self._counted_ticks, 6) * TICK_S >= self._hang_after_s:
            silent_s = self._silent_ticks * TICK_S
            return f"the engine has given no sign of life for {silent_s:.0f} s"
        step_s = self._last.step_s
        idle_s = min((one.idle_s for one in self._companions), default=self.idle_s)
        if min(self.idle_s, idle_s, step_s) >= self._hang_after_s:
            return f"the engine has made no progress in a step for {step_s:.0f} s"
        if 0 < self._step_timeout_s <= step_s:
            return f"the engine has computed one step for {step_s:.0f} s"
        return ""

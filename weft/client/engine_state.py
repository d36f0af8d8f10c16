"""What the front knows of its engine: whether there is one, its latest numbers, its weights.

`EngineClient` writes this from the engine's messages; everybody else reads it. Knows nothing of
requests.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from weft.client.hang_detector import HangDetector
from weft.messages.status import EngineReady, Stats
from weft.messages.weights import FIRST_VERSION, WeightsReply
from weft.observe.metrics import Metrics
from weft.observe.status import StatusLine


class EngineUnavailable(Exception):
    """The engine is not ready yet, has stopped, or does not answer. The message is for the user."""


class EngineState:
    def __init__(self, metrics: Metrics, hang_detector: HangDetector) -> None:
        self.ready: EngineReady | None = None  # its first message
        self.lost: str | None = None  # why there is no engine any more
        self.stats = Stats()  # the latest
        self.stats_at = time.monotonic()  # when they came
        self.weight_version = FIRST_VERSION  # of the weights in use
        self.released: list[str] = []  # memory that the engine has given back: it takes no work
        self.hang_detector = hang_detector
        self._metrics = metrics
        self._status_line = StatusLine()
        self._waiters: list[asyncio.Future[None]] = []  # for `ready` or `lost`

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
        """Of several reasons the first one counts."""
        if self.lost is None:
            self.lost = reason
        self._wake_waiters()

    def record_stats(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        numbers = msgspec.structs.asdict(stats)
        self._metrics.engine.set(numbers)
        self._status_line.take(numbers, self.stats_at)

    def record_weights(self, reply: WeightsReply) -> None:
        self.weight_version = reply.weight_version
        self.released = reply.released

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

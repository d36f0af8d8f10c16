"""One engine of a fleet, as the front knows it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from weft.client.engine_state import HangDetector
from weft.messages.codec import ToEngine
from weft.messages.status import (
    EngineReady,
    Stats,
)
from weft.observe.engine_numbers import EngineNumbers

Send = Callable[[ToEngine], None]


class Member:
    """Which requests it has is known to the router; here is whether it takes some, and its numbers.

    An engine that is started again is the same member: it has the same rank.
    """

    def __init__(
        self,
        rank: int,
        numbers: EngineNumbers,
        detector: HangDetector,
    ) -> None:
        self.rank = rank
        self.numbers = numbers
        self.detector = detector
        self.ready: EngineReady | None = None  # None: no engine, or one that loads
        self.missing = "it is loading"  # why it takes no request; nothing if it takes some
        self.stats = Stats()  # the latest
        self.stats_at = time.monotonic()  # when they came
        self._send: Send | None = None

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return not self.missing

    def attach(self, send: Send) -> None:
        """There is an engine, which loads."""
        self._send = send
        self.ready = None
        self.missing = "it is loading"

    def detach(self, reason: str) -> None:
        """There is none any more."""
        self._send = None
        self.ready = None
        self.missing = reason
        self.record(Stats())

    def send(self, message: ToEngine) -> None:
        """Send it, if there is an engine."""
        if self._send is not None:
            self._send(message)

    def record(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        self.numbers.set(msgspec.structs.asdict(stats), self.stats_at)

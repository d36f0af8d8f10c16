"""The front's record of one engine of a fleet."""

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
    """One engine: its state and its numbers. The router records its requests.

    An engine that is started again has the same rank, and stays the same member.
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
        self.ready: EngineReady | None = None  # None: there is no engine, or it is loading
        self.missing = "it is loading"  # why it takes no requests; "" if it takes requests
        self.stats = Stats()  # the latest numbers
        self.stats_at = time.monotonic()  # when the numbers came
        self._send: Send | None = None

    @property
    def is_up(self) -> bool:
        """Whether the engine takes requests."""
        return not self.missing

    def attach(self, send: Send) -> None:
        """An engine has been started and is loading; `send` sends it messages."""
        self._send = send
        self.ready = None
        self.missing = "it is loading"

    def detach(self, reason: str) -> None:
        """The engine has ended, for this reason."""
        self._send = None
        self.ready = None
        self.missing = reason
        self.record(Stats())

    def send(self, message: ToEngine) -> None:
        """Send a message, if there is an engine; else drop it."""
        if self._send is not None:
            self._send(message)

    def record(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        self.numbers.set(msgspec.structs.asdict(stats), self.stats_at)

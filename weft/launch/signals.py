"""Signals that stop a server. During the start, the first signal ends the start in order
(`StartSignals`); later, the event loop handles the signals (`LoopSignals`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks to stop. Each caller ends what it has started, and lets the exception pass."""


class StartSignals:
    """Raises `Stopped` in the main thread when the first signal comes. Use as a context manager."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_deferred = False
        self._has_come = False

    def __enter__(self) -> StartSignals:
        self._before = {number: signal.signal(number, self._arrived) for number in STOPPING}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The body runs to its end: a signal that arrives meanwhile raises `Stopped` after it."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._has_come:
            raise Stopped

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        ignore()
        self._has_come = True
        if not self._is_deferred:
            raise Stopped


class LoopSignals:
    """Signals while an event loop runs: the first asks to stop, the second to stop immediately."""

    def __init__(self) -> None:
        """Call this in the event loop that handles the signals."""
        self.stop = asyncio.Event()
        self.abort = asyncio.Event()
        for number in STOPPING:
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        if self.stop.is_set():
            self.abort.set()
        else:
            self.stop.set()


def ignore() -> None:
    """Ignore these signals from now on: this process is ending, and ends in order."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)

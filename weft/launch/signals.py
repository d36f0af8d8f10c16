"""Signals that stop a server: while it starts, the first ends the start in order (`StartSignals`);
while it runs, the event loop takes them (`LoopSignals`).
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
    """A signal has asked to stop. Whoever has started something ends it, and passes this on."""


class StartSignals:
    """Raises `Stopped` in the main thread when the first signal comes. Use as a context manager."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_held = False
        self._has_come = False

    def __enter__(self) -> StartSignals:
        self._before = {number: signal.signal(number, self._arrived) for number in STOPPING}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is done here is done whole: a signal that comes meanwhile waits for the end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._has_come:
            raise Stopped

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        ignore()
        self._has_come = True
        if not self._is_held:
            raise Stopped


class LoopSignals:
    """Signals while an event loop runs:
    the first of them asks to stop, the second to stop at once.
    """

    def __init__(self) -> None:
        """To be made in the loop that takes them."""
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
    """From here on this process is ending, and no signal can keep it from leaving in order."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)

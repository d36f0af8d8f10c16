"""Wakes the engine's thread from another thread, through a pipe that a poller can also watch.

A notification only means that there is work; it carries no message. Several notifications before
the engine's thread reads the pipe count as one.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from contextlib import suppress


class WakeupPipe:
    """The pipe, which is closed at the latest when nobody can notify or wait any more. `_socket` is
    its reading end; the name is that of other receiving ends, for pollers."""

    def __init__(self) -> None:
        self._socket, self._writing_end = os.pipe()
        os.set_blocking(self._socket, False)
        os.set_blocking(self._writing_end, False)
        self._poll = select.poll()  # select() takes no handle above 1,023
        self._poll.register(self._socket, select.POLLIN)
        self._closing = threading.Lock()
        self._close = weakref.finalize(self, _close, self._socket, self._writing_end)

    def notify(self) -> None:
        """Wake the thread that waits. Any thread may call this, and it never waits. Does nothing
        when the pipe is closed."""
        # If the pipe is full, the engine is notified already.
        with self._closing, suppress(BlockingIOError):
            if self._close.alive:
                os.write(self._writing_end, b"!")

    def drain(self) -> bool:
        """Take the notifications out of the pipe. Returns whether there were any."""
        try:
            return bool(os.read(self._socket, 1 << 16))
        except BlockingIOError:
            return False

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a notification comes, at most `timeout_s`. Returns whether one came."""
        self._poll.poll(timeout_s * 1_000)
        return self.drain()

    def close(self) -> None:
        with self._closing:
            self._close()


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)

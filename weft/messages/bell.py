"""Wakes the engine's thread from another one: `ring` may be called by anybody, `wait` and the sleeper are rung out of
their sleep. Rings add up to one."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class Bell:
    """`_socket` is what a poller waits for, as at the other receiving ends."""

    def __init__(self) -> None:
        self._socket, self._rope = os.pipe()
        os.set_blocking(self._socket, False)
        os.set_blocking(self._rope, False)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it has been rung, and nobody has listened yet
            os.write(self._rope, b"!")

    def hush(self) -> bool:
        """Whether it has been rung since."""
        try:
            return bool(os.read(self._socket, 1 << 16))
        except BlockingIOError:
            return False

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is rung, at most `timeout_s`. True if it has been."""
        select.select([self._socket], [], [], timeout_s)
        return self.hush()

    def close(self) -> None:
        os.close(self._socket)
        os.close(self._rope)

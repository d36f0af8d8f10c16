"""Processes that each have a link to every other one, and do the same things in the same order.

A pair of sockets joins two of them, which nobody else has: whoever starts the processes makes them,
and they inherit their ends. When one is gone, all others see it at once.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from weft.ops.sharding import RankLost

HEADER = struct.Struct("<QQ")  # number of the swap, bytes behind it
MAX_BYTES = 1 << 40
WAKEUP_BYTES = 1 << 16

T = TypeVar("T")


class Peers:
    """One process's end of the links to all others. One thread uses it, but for `wake`."""

    def __init__(self, rank: int, ends: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`ends`: of each other process, by its number. `timeout_s`: for which they wait for each
        other."""
        self.rank = rank
        self.size = len(ends) + 1
        self._ends = dict(sorted(ends.items()))
        self._num_swaps = 0
        self._lost = ""
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        for end in self._ends.values():
            end.settimeout(timeout_s)

    @property
    def others(self) -> Sequence[int]:
        return list(self._ends)

    def call(self, word: bytes) -> dict[int, bytearray]:
        """Say a few bytes to all others, and hear of each what it has to say. Who waits for the
        others (`wait`) hears that somebody calls. Raises RankLost, now and ever after one was
        lost."""
        self._begin()
        for other, end in self._ends.items():
            self._with(other, self._give, end, word)
        return {other: self._with(other, self._take, end) for other, end in self._ends.items()}

    def swap(self, messages: Mapping[int, bytes]) -> dict[int, bytearray]:
        """Give each other process its message of any size, and get one of each: all do so, behind a
        call. Raises RankLost.

        Two that swap large messages would wait for each other if both gave first: the one with the
        lower number does. All go through the pairs in one order, so that nobody waits in a ring.
        """
        self._begin()
        found: dict[int, bytearray] = {}
        for other, end in self._ends.items():
            if self.rank < other:
                self._with(other, self._give, end, messages[other])
                found[other] = self._with(other, self._take, end)
            else:
                found[other] = self._with(other, self._take, end)
                self._with(other, self._give, end, messages[other])
        return found

    def wait(self) -> bool:
        """Until another process calls, or one is gone, or somebody says `wake` here. Returns
        whether it was a process."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        numbers = set()
        if not self._lost:
            for end in self._ends.values():
                numbers.add(end.fileno())
                poll.register(end, select.POLLIN)
        has_called = any(number in numbers for number, _ in poll.poll())
        with suppress(BlockingIOError):
            self._wakeup.recv(WAKEUP_BYTES)
        return has_called

    def wake(self) -> None:
        """Let `wait` return. Any thread may say so."""
        with suppress(BlockingIOError):  # it is full: `wait` returns anyway
            self._wakeup_end.send(b"!")

    def wait_for(self, timeout_s: float) -> bool:
        """The same, for at most so long and for the others alone."""
        if self._lost:
            raise RankLost(self._lost)
        ready, _, _ = select.select(list(self._ends.values()), [], [], timeout_s)
        return bool(ready)

    def close(self) -> None:
        """Leave, and call nothing more."""
        self.leave("this engine has ended")
        self._wakeup.close()
        self._wakeup_end.close()

    def leave(self, why: str) -> None:
        """Take part in nothing any more, for this reason: all others see it."""
        self._lost = self._lost or why
        for end in self._ends.values():
            end.close()

    def _begin(self) -> None:
        if self._lost:
            raise RankLost(self._lost)
        self._num_swaps += 1

    def _with(self, other: int, do: Callable[..., T], *args: object) -> T:
        """Raises RankLost where the other one is to blame."""
        try:
            return do(*args)
        except TimeoutError:
            self.leave(f"engine {other} does not answer")
        except (OSError, EOFError):
            self.leave(f"engine {other} is gone")
        raise RankLost(self._lost)

    def _give(self, end: socket.socket, message: bytes) -> None:
        end.sendall(HEADER.pack(self._num_swaps, len(message)) + message)

    def _take(self, end: socket.socket) -> bytearray:
        number, num_bytes = HEADER.unpack(_read(end, HEADER.size))
        if number != self._num_swaps or num_bytes > MAX_BYTES:
            raise EOFError(f"swap {self._num_swaps} here is {number} there")
        return _read(end, num_bytes)


def _read(end: socket.socket, num_bytes: int) -> bytearray:
    found = bytearray(num_bytes)
    view = memoryview(found)
    while view:
        num = end.recv_into(view)
        if not num:
            raise EOFError
        view = view[num:]
    return found

"""Processes that have a link to each other, and run the same operations in the same order.

Each two are joined by a private pair of sockets: the process that starts them creates the pairs,
and they inherit their ends. Or they are on several machines and have connected; then their messages
bear marks (`weft/seal.py`). When one process ends, all others notice it at once.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from weft.ops.sharding import RankLost
from weft.seal import Open, Seals, is_same

HEADER = struct.Struct("<QQ")  # number of the swap, bytes after it
MAX_BYTES = 1 << 40
WAKEUP_BYTES = 1 << 16

T = TypeVar("T")


class Forged(Exception):
    """A message is not what the other process has sent."""


class PeerLink(NamedTuple):
    """One end of the link between two processes. Methods raise OSError and EOFError."""

    end: socket.socket
    seals: Seals

    def give(self, number: int, message: bytes) -> None:
        """Send the message of this swap."""
        content = HEADER.pack(number, len(message)) + message
        mark = self.seals.sending.begin()
        mark.add(content)
        self.end.sendall(content + mark.end())

    def take(self, number: int) -> bytearray:
        """Receive the message of this swap. Raises Forged."""
        header = read_exactly(self.end, HEADER.size)
        theirs, num_bytes = HEADER.unpack(header)
        if theirs != number or num_bytes > MAX_BYTES:
            raise EOFError(f"swap {number} here is {theirs} there")
        message = read_exactly(self.end, num_bytes)
        seal = self.seals.receiving
        mark = seal.begin()
        mark.add(memoryview(header))
        mark.add(memoryview(message))
        if not is_same(bytes(read_exactly(self.end, seal.size)), mark.end()):
            raise Forged
        return message


class Peers:
    """One process's ends of the links to all others. Used by one thread, except `wake`."""

    def __init__(
        self,
        rank: int,
        ends: Mapping[int, socket.socket],
        timeout_s: float,
        called: str = "engine",
        seals: Mapping[int, Seals] | None = None,
    ) -> None:
        """`ends`: by the number of the other process. `timeout_s`: for which processes wait for
        each other. `called`: what one of them is. `seals`: of each end; None: nobody else can write
        into them."""
        self._called = called
        self.rank = rank
        self.size = len(ends) + 1
        self._links: dict[int, PeerLink] = {}
        for other, end in sorted(ends.items()):
            own = Seals(Open(), Open()) if seals is None else seals[other]
            self._links[other] = PeerLink(end, own)
        self._num_swaps = 0
        self._lost = ""
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        for link in self._links.values():
            link.end.settimeout(timeout_s)

    @property
    def others(self) -> Sequence[int]:
        return list(self._links)

    def call(self, word: bytes) -> dict[int, bytearray]:
        """Send a few bytes to all other processes, and receive those of each. A process that is in
        `wait` returns from it when another one calls. Raises RankLost, also in every call after a
        process was lost."""
        self._begin()
        for other, link in self._links.items():
            self._with(other, link.give, self._num_swaps, word)
        return {
            other: self._with(other, link.take, self._num_swaps)
            for other, link in self._links.items()
        }

    def swap(self, messages: Mapping[int, bytes]) -> dict[int, bytearray]:
        """Send each other process its message of any size, and receive one from each. All processes
        must do so, after a call. Raises RankLost.

        Two processes that swap large messages would wait for each other if both sent first, so the
        one with the lower number does. All go through the pairs in one order, so that there is no
        circular wait.
        """
        self._begin()
        found: dict[int, bytearray] = {}
        for other, link in self._links.items():
            if self.rank < other:
                self._with(other, link.give, self._num_swaps, messages[other])
                found[other] = self._with(other, link.take, self._num_swaps)
            else:
                found[other] = self._with(other, link.take, self._num_swaps)
                self._with(other, link.give, self._num_swaps, messages[other])
        return found

    def wait(self) -> bool:
        """Wait until another process calls, or one is gone, or `wake` is called here. Returns
        whether another process was the reason."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        numbers = set()
        if not self._lost:
            for link in self._links.values():
                numbers.add(link.end.fileno())
                poll.register(link.end, select.POLLIN)
        has_called = any(number in numbers for number, _ in poll.poll())
        with suppress(BlockingIOError):
            self._wakeup.recv(WAKEUP_BYTES)
        return has_called

    def wake(self) -> None:
        """Let `wait` return. May be called on any thread."""
        with suppress(BlockingIOError):  # the buffer is full: `wait` returns anyway
            self._wakeup_end.send(b"!")

    def wait_for(self, timeout_s: float) -> bool:
        """Wait until another process calls, at most `timeout_s`. Returns whether one has."""
        if self._lost:
            raise RankLost(self._lost)
        poll = select.poll()  # select() takes no handle above 1,023
        for link in self._links.values():
            poll.register(link.end, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Leave, and release everything. No other method may be called afterwards."""
        self.leave(f"this {self._called} has ended")
        self._wakeup.close()
        self._wakeup_end.close()

    def leave(self, why: str) -> None:
        """Close all links for this reason: all other processes notice it."""
        self._lost = self._lost or why
        for link in self._links.values():
            link.end.close()

    def _begin(self) -> None:
        if self._lost:
            raise RankLost(self._lost)
        self._num_swaps += 1

    def _with(self, other: int, do: Callable[..., T], *args: object) -> T:
        """Call `do`. Raises RankLost if the link to the other process fails."""
        try:
            return do(*args)
        except TimeoutError:
            self.leave(f"{self._called} {other} does not answer")
        except (OSError, EOFError):
            self.leave(f"{self._called} {other} is gone")
        except Forged:
            self.leave(f"what comes from {self._called} {other} was changed on its way")
        raise RankLost(self._lost)


def read_exactly(end: socket.socket, num_bytes: int) -> bytearray:
    """Raises OSError, also if the other end has closed before."""
    found = bytearray(num_bytes)
    read_into(end, memoryview(found))
    return found


def read_into(end: socket.socket, view: memoryview) -> None:
    """Fill `view`, which is of bytes. Raises OSError, a ConnectionError if the other end has closed
    before."""
    while view:
        num = end.recv_into(view)
        if not num:
            raise ConnectionError("the other end has closed")
        view = view[num:]

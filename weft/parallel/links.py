"""Messages between rank 0 and one rank that follows it: in order, and complete.

On one machine a link is a pair of sockets that only the two processes have: the follower inherits
its end, so no other process can write to it, and nothing is left when both are gone. The end of
either process ends the link at once. To another machine it is a ZeroMQ socket with CURVE
(`door.py`); the process that watches that rank reports its end.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from typing import Protocol

import zmq

from weft.ops.sharding import RankLost
from weft.parallel.door import POLL_MS, ZmqContext, ZmqSocket

HEADER = struct.Struct("<cQ")  # kind and length of a message
MAX_BYTES = 1 << 40
PIECE_BYTES = 1 << 20


class Link(Protocol):
    """One end. Used by one thread at a time."""

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Raises RankLost if the other process is gone."""
        ...

    def recv(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """Kind and content of the next message. Raises RankLost if the other process is gone,
        TimeoutError after `timeout_s`."""
        ...

    def close(self) -> None: ...


class Loss:
    """Why a rank was lost: the first reported reason. Any thread may report one."""

    def __init__(self) -> None:
        self.reason = ""
        self._said = threading.Event()
        self._lock = threading.Lock()

    def tell(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
        self._said.set()

    def wait(self, timeout_s: float) -> str:
        """The reason, as soon as it is known; "" after the timeout."""
        self._said.wait(timeout_s)
        return self.reason


class SocketLink:
    """A `Link` over one of a pair of sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, kind: bytes, data: bytes = b"") -> None:
        try:
            self._socket.settimeout(None)
            self._socket.sendall(HEADER.pack(kind, len(data)) + data)
        except OSError as exc:
            raise RankLost("another rank has ended") from exc

    def recv(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        try:
            self._socket.settimeout(timeout_s)
            kind, num_bytes = HEADER.unpack(self._take(HEADER.size))
            if num_bytes > MAX_BYTES:
                raise RankLost("another rank has sent an invalid message")
            return kind, self._take(num_bytes)
        except TimeoutError:
            raise
        except OSError as exc:
            raise RankLost("another rank has ended") from exc

    def close(self) -> None:
        self._socket.close()

    def _take(self, num_bytes: int) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            piece = self._socket.recv(min(num_bytes - len(found), PIECE_BYTES))
            if not piece:
                raise RankLost("another rank has ended")
            found += piece
        return bytes(found)


def socket_links() -> tuple[SocketLink, socket.socket]:
    """A link, and the socket for its other end, which the other process inherits."""
    mine, theirs = socket.socketpair()
    return SocketLink(mine), theirs


class NodeLink:
    """A `Link` to a rank of another node."""

    def __init__(self, end: ZmqSocket, loss: Loss, context: ZmqContext | None = None) -> None:
        """`end` has one peer, which may not be connected yet. `loss`: knows if the rank is lost.
        `context`: that of the socket, if this link is its only user."""
        self._socket = end
        self._loss = loss
        self._context = context

    def send(self, kind: bytes, data: bytes = b"") -> None:
        while True:
            self._check()
            try:
                self._socket.send_multipart([kind, data], zmq.NOBLOCK)
                return
            except zmq.Again:
                self._socket.poll(POLL_MS, zmq.POLLOUT)

    def recv(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._socket.poll(POLL_MS):
            self._check()
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutError
        frames = self._socket.recv_multipart()
        if len(frames) != 2:
            raise RankLost("another rank has sent an invalid message")
        kind, data = frames
        return kind, data

    def close(self) -> None:
        """Close; messages in the queue are still sent."""
        self._socket.close()
        if self._context is not None:
            self._context.term()

    def _check(self) -> None:
        if self._loss.reason:
            raise RankLost(self._loss.reason)

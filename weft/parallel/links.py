"""Messages between the rank that decides and one that follows it, in order, each whole.

On one machine a link is a pair of sockets that only the two processes have: the follower inherits
its end, so nobody else can write to it, and nothing is left of it when they are gone. The end of
either process ends the link at once.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from weft.ops.sharding import RankLost

HEADER = struct.Struct("<cQ")  # kind and length of a message
MAX_BYTES = 1 << 40
PIECE_BYTES = 1 << 20


class Link(Protocol):
    """One end. Used by one thread at a time."""

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Raises RankLost if nobody is there any more."""
        ...

    def recv(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """Kind and content of the next message. Raises RankLost if nobody is there any more,
        TimeoutError after `timeout_s`."""
        ...

    def close(self) -> None: ...


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
                raise RankLost("another rank has sent what is no message")
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
    """A link, and the socket of its other end, which the other process inherits."""
    mine, theirs = socket.socketpair()
    return SocketLink(mine), theirs

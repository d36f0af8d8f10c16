"""uvicorn's HTTP protocol with the guards it lacks: on the size of an unfinished head, on the time for it, on stalls,
on the number of connections.

Without them a client holds memory or connections for as long as it likes (endless headers, slowloris, a reader that
has stopped, a thousand sockets that say nothing).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.config.limits import Limits

QUIET_S = 1.0  # a connection that has said nothing for so long may be closed to make room
SWEEP_S = 0.5  # between two looks for such

_HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
_TOO_LARGE = _HEAD % b"431 Request Header Fields Too Large" + (
    b'{"error":{"message":"the request line and headers are too large","type":"invalid_request_error",'
    b'"param":null,"code":431}}'
)
_CROWDED = _HEAD % b"503 Service Unavailable\r\nretry-after: 1" + (
    b'{"error":{"message":"there are too many connections","type":"service_unavailable_error","param":null,"code":503}}'
)


class Door:
    """What the connections of one server share. `refused` is told the name of each limit that ends one."""

    def __init__(self, limits: Limits, refused: Callable[[str], None]) -> None:
        self.limits = limits
        self.refused = refused
        self._swept_at = 0.0

    @property
    def last_place(self) -> int:
        """Connections up to which a request is at least told that there are too many, and health is answered."""
        return self.limits.max_connections + self.limits.max_connections // 4 + 64

    def make_room(self, connections: set[Any], now: float) -> None:
        """Close those that have nothing to say. Looks at all of them, hence not for every newcomer."""
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        quiet = [one for one in connections if isinstance(one, GuardedProtocol) and one.is_quiet(now)]
        for connection in quiet:
            self.refused("max_connections")
            connection.transport.close()
            connections.discard(connection)  # it no longer counts


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._door = door
        self._limits = door.limits
        self._heard_at = self.loop.time()
        self._head_len = 0  # bytes of the head that is being read; -1 while there is none
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.max_connections:
            self._door.make_room(self.connections, self._heard_at)
        super().connection_made(transport)
        if len(self.connections) > self._door.last_place:
            self._cut_off("max_connections", _CROWDED)
            return
        _send_at_once(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)
        if self._head_len >= 0 and not self.transport.is_closing():
            self._head_len += len(data)
            if self._head_len > self._limits.max_head_bytes:
                self._cut_off("max_header_bytes", _TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_len < 0:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_len = -1
        if self._head_timer is not None:
            self._head_timer.cancel()
        # for the edge, which knows what may be asked all the same
        self.scope["weft.crowded"] = len(self.connections) > self._limits.max_connections  # type: ignore[typeddict-unknown-key]
        self.scope["weft.connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def write_piece(self, body: bytes) -> None:
        """A piece of the body of the answer that is being sent, at once: what `send` does with it, without a coroutine.
        For answers without a declared length, whose head has been sent, while `takes_pieces`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    @property
    def takes_pieces(self) -> bool:
        """Whether the client is there and reads."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def is_quiet(self, now: float) -> bool:
        """Whether no request is being answered or has begun to arrive, for a while."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and self._head_len <= 0 and now - self._heard_at >= QUIET_S

    def _await_head(self) -> None:
        self._head_len = 0
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_len > 0:  # else the connection was only idle
            self._door.refused("head_timeout_s")
        self.transport.close()

    def _stalled(self) -> None:
        self._door.refused("stall_timeout_s")
        self.transport.abort()

    def _cut_off(self, limit: str, answer: bytes) -> None:
        self._door.refused(limit)
        self.transport.write(answer)
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()


def _send_at_once(transport: asyncio.Transport) -> None:
    """TCP_NODELAY. asyncio sets it too, but not on sockets made without naming the protocol: then every answer waits
    40 ms for the acknowledgement of its own headers."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

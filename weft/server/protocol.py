"""uvicorn's HTTP protocol with the guards it lacks: on the size of an unfinished head, on the time for it, on stalls.

Without them a client holds memory or a connection for as long as it likes (endless headers, slowloris, a reader that
has stopped).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.server.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, STALL_TIMEOUT_S

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the request line and headers are too large","type":"invalid_request_error",'
    b'"param":null,"code":431}}'
)


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_len = 0  # bytes of the head that is being read; -1 while there is none
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _send_at_once(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_len >= 0 and not self.transport.is_closing():
            self._head_len += len(data)
            if self._head_len > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_len < 0:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_len = -1
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _await_head(self) -> None:
        self._head_len = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

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

"""uvicorn's HTTP protocol with the limits that it lacks: on the size of an unfinished head and the
time for it, on the framing of a chunked body, on stalls, and on the number of connections.

Without them a client can hold memory or connections for any time (endless headers or trailers,
slowloris, a stopped reader, a thousand silent sockets).

Trailers are dropped: a field after the body is no header (RFC 9110, section 6.5.1), so it cannot
contain a key.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.config.limits import MAX_URL_BYTES, Limits
from weft.server.http.parser import HttpParser

IDLE_S = 1.0  # a connection that has waited this long may be closed to make room
FRAMING_PER_BYTE = 8  # bytes allowed per body byte: chunks of one byte take 5
PROBE_PAUSES_S = (0.05, 0.2, 1.0)  # between probes of a client that has stopped sending
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"  # an answer that every client ignores

_HEAD = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
_TOO_LARGE = _HEAD % b"431 Request Header Fields Too Large" + (
    b'{"error":{"message":"the request line and headers are too large",'
    b'"type":"invalid_request_error","param":null,"code":431}}'
)
_TOO_LONG = _HEAD % b"414 URI Too Long" + (
    b'{"error":{"message":"the URL is too long",'
    b'"type":"invalid_request_error","param":null,"code":414}}'
)
_BAD_REQUEST = _HEAD % b"400 Bad Request" + (
    b'{"error":{"message":"this is no valid HTTP request",'
    b'"type":"invalid_request_error","param":null,"code":400}}'
)
_TOO_MUCH_FRAMING = _HEAD % b"400 Bad Request" + (
    b'{"error":{"message":"the chunk extensions and trailers of the body are too large",'
    b'"type":"invalid_request_error","param":null,"code":400}}'
)
_OVERLOADED = _HEAD % b"503 Service Unavailable\r\nretry-after: 1" + (
    b'{"error":{"message":"there are too many connections",'
    b'"type":"service_unavailable_error","param":null,"code":503}}'
)


class ConnectionLimiter:
    """The shared state of one server's connections.

    `refused` is called with the name of each limit that ends a connection.

    A connection *works* while the server answers one of its admitted requests; otherwise it
    *waits*: for a head, for the end of a body that is not needed, or for the client to read a
    refusal. Only working connections count against `max_connections`, and the connection that has
    waited longest is closed first. So clients without a key cannot keep out clients that have one.
    """

    def __init__(self, limits: Limits, refused: Callable[[str], None]) -> None:
        self.limits = limits
        self.refused = refused
        self._waiting: dict[GuardedProtocol, float] = {}  # start of the wait, the longest first

    @property
    def most_connections(self) -> int:
        """Number of connections up to which a waiting one is kept for at least `IDLE_S`."""
        return self.limits.max_connections + self.limits.max_connections // 4 + 64

    def waits(self, connection: GuardedProtocol, now: float) -> None:
        """The connection waits since `now`, unless it was already waiting."""
        self._waiting.setdefault(connection, now)

    def works(self, connection: GuardedProtocol) -> None:
        self._waiting.pop(connection, None)

    def left(self, connection: GuardedProtocol) -> None:
        self._waiting.pop(connection, None)

    def is_overloaded(self, connections: set[Any]) -> bool:
        """Whether the number of working connections has reached the limit."""
        return len(connections) - len(self._waiting) >= self.limits.max_connections

    def has_room(
        self,
        connections: set[Any],
        newcomer: GuardedProtocol,
        now: float,
    ) -> bool:
        """Whether `newcomer`, one of `connections`, may stay.

        Closes other connections if necessary.
        """
        while len(connections) > self.limits.max_connections and self._waiting:
            oldest, since = next(iter(self._waiting.items()))
            if now - since < IDLE_S and len(connections) <= self.most_connections:
                break
            if oldest is newcomer:
                break
            self.refused("max_connections")
            self.left(oldest)
            connections.discard(oldest)  # no longer counted
            oldest.transport.abort()
        return len(connections) <= self.most_connections


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, limiter: ConnectionLimiter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limiter = limiter
        self._limits = limiter.limits
        self.parser = HttpParser(self)  # type: ignore[assignment]
        self.url = b""  # of the current head
        self._head_len = 0  # bytes of the current head; -1: no head is being read
        # Bytes since the head that do not belong to the body: chunk sizes, extensions, trailers.
        self._framing_len = 0
        self._body_len = 0
        self._has_ended_head = False  # in the current data
        # The request that is being answered, or was answered last; `cycle` is the request read
        # last.
        self.answered: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe: ReadProbe | None = None  # once the client has stopped sending

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._limiter.waits(self, now)
        if not self._limiter.has_room(self.connections, self, now):
            self._cut_off("max_connections", _OVERLOADED)
            return
        _send_at_once(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._limiter.left(self)
        answered = self.answered
        if (
            answered is not None and not answered.response_complete
        ):  # later requests may have been read
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Like the base class, but bytes that start no request do not extend the time limit for a
        head."""
        self._has_ended_head = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if len(self.url) > MAX_URL_BYTES:
                self._cut_off("max_url_bytes", _TOO_LONG)
            else:
                self._close_with(_BAD_REQUEST)
            return
        if self.transport.is_closing():
            return
        if self._head_len >= 0:
            self._head_len += len(data)
            if self._head_len > self._limits.max_head_bytes:
                self._cut_off("max_header_bytes", _TOO_LARGE)
        elif self._has_ended_head:
            self._framing_len = 0
        else:
            self._framing_len += len(data)
            if (
                self._framing_len
                > self._limits.max_framing_bytes + FRAMING_PER_BYTE * self._body_len
            ):
                self._cut_off("max_framing_bytes", _TOO_MUCH_FRAMING)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has stopped sending.

        If it still reads, it gets its answer; only a write can show whether it reads.
        """
        answered = self.answered
        if answered is None or answered.response_complete or self.cycle.more_body:
            return False
        self._probe = ReadProbe(self)
        if not self._probe.can_write:
            return False
        self.cycle.keep_alive = False
        self._probe.write(0)
        return True

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        if self._head_len < 0:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_len >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_len = -1
        self._has_ended_head = True
        self._body_len = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
        self.scope["weft.connection"] = self  # type: ignore[typeddict-unknown-key]
        self.scope["weft.came_s"] = time.perf_counter()  # type: ignore[typeddict-unknown-key]
        if self.parser.get_http_version() != "1.1":
            self.app = _CloseDelimited(self.app)
        super().on_headers_complete()
        if self.answered is None or self.answered.response_complete:
            self.answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._body_len += len(body)
        self._framing_len -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self.answered = self.pipeline[-1][0]
        self._limiter.waits(self, self.loop.time())
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by the base class for an invalid request."""
        self._close_with(_BAD_REQUEST)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    # ---- for the application

    def admit(self) -> bool:
        """Admit the current request: the connection works until `done`. False if the number of
        working connections has reached the limit."""
        if self._limiter.is_overloaded(self.connections):
            return False
        self._limiter.works(self)
        return True

    def done(self) -> None:
        """The server has finished its work for the current request."""
        self._limiter.waits(self, self.loop.time())

    @property
    def is_receiving(self) -> bool:
        """Whether the end of the current request has not arrived yet."""
        return self.answered is not None and self.answered.more_body

    def end_with_connection(self) -> None:
        """The answer that begins now has neither a declared length nor chunks: it ends with the
        connection."""
        assert self.answered is not None
        self.answered.chunked_encoding = False

    def write_piece(self, body: bytes) -> None:
        """Write a piece of the current answer's body at once: like `send`, without a coroutine.
        Only for answers without a declared length, after their head was sent, while
        `takes_pieces`."""
        assert self.answered is not None
        if self.answered.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            self.transport.write(body)

    @property
    def takes_pieces(self) -> bool:
        """Whether the client is connected and reads."""
        return not (self.flow.write_paused or self.transport.is_closing())

    # ---- inside

    def _await_head(self) -> None:
        self._head_len = 0
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_len > 0:  # else the connection was idle
            self._limiter.refused("head_timeout_s")
        self.transport.close()

    def _stalled(self) -> None:
        self._limiter.refused("stall_timeout_s")
        self.transport.abort()

    def _cut_off(self, limit: str, answer: bytes) -> None:
        self._limiter.refused(limit)
        self._close_with(answer)

    def _close_with(self, answer: bytes) -> None:
        """Close the connection; first send `answer`, if no other answer has started."""
        answered = self.answered
        if answered is None or answered.response_complete or not answered.response_started:
            self.transport.write(answer)
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._probe is not None:
            self._probe.stop()


class ReadProbe:
    """Shows whether a client that has stopped sending still reads: it writes bytes that the client
    ignores into the answers to its requests. If the client is gone, its system rejects them, and
    the next write fails, which ends the connection."""

    def __init__(self, connection: GuardedProtocol) -> None:
        self._connection = connection
        self.timer: asyncio.TimerHandle | None = None  # until the next bytes are written

    @property
    def can_write(self) -> bool:
        """Whether there are bytes that the client ignores: not in HTTP/1.0, nor in a body of known
        length."""
        answer = self._connection.answered
        assert answer is not None
        if answer.scope["http_version"] != "1.1":
            return False
        return not answer.response_started or bool(answer.chunked_encoding)

    def write(self, number: int) -> None:
        """Write the bytes for the time after so many others, and plan the next ones."""
        connection = self._connection
        transport = connection.transport
        answer = connection.answered
        assert answer is not None
        if transport.is_closing() or answer.response_complete or not self.can_write:
            return
        if not answer.response_started:
            transport.write(INTERIM)
        elif not connection.flow.write_paused:
            transport.write(b"0")  # the next chunk's size gets a leading zero
        if number < len(PROBE_PAUSES_S):
            pause_s = PROBE_PAUSES_S[number]
            self.timer = connection.loop.call_later(pause_s, self.write, number + 1)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class _CloseDelimited:
    """The application for HTTP/1.0 clients, which do not support chunks: an answer without a
    declared length ends with the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedProtocol = scope["weft.connection"]
        is_plain = False

        async def send_plain(message: Message) -> None:
            nonlocal is_plain
            if message["type"] == "http.response.start":
                is_plain = not any(name == b"content-length" for name, _ in message["headers"])
                if is_plain:
                    connection.end_with_connection()
            elif is_plain and message.get("body"):
                await connection.flow.drain()
                if connection.takes_pieces:
                    connection.write_piece(message["body"])
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive, send_plain)


def _send_at_once(transport: asyncio.Transport) -> None:
    """Set TCP_NODELAY. asyncio does so only on sockets that were created with an explicit protocol;
    on others, every answer waits 40 ms for the acknowledgement of its own headers."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

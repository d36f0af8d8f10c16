"""A small HTTP/1.1 client: sends a request to a server and streams its answer back.

Connections are kept and reused, unless the server has closed them. A request is sent once; but a
server may close a kept connection at the moment when a request comes, so a question that changes
nothing is then asked once more. Nothing else here knows the meaning of a request.

httptools, which uvicorn's server needs anyway, parses the answers; this module does the rest. httpx
0.28 needs 1.9 times the processor time for each piece of a stream (httpcore with h11, in Python;
3,000 pieces of 190 bytes, in turns within one process), and does not say whether the server has
received a request, which decides whether another server may get it. aiohttp 3 says so, and needs
1.2 times the time; but it would be one more dependency only for this, with seven of its own.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]

READ_BYTES = 262_144
CONNECT_S = 3.0
KEPT_S = 15.0  # lifetime of an unused connection; servers close theirs after 30 s
MAX_KEPT = 64
MAX_HEAD_BYTES = 1 << 20
INTERIM = (100, 102, 103)  # statuses of answers before the final one
FINAL = range(200, 600)
CHANGES_NOTHING = ("GET", "HEAD")


class ServerGone(Exception):
    """The server cannot be reached, or its answer ended early. The message is the reason."""


class NotReached(ServerGone):
    """The server has not received the request."""


class NoAnswer(ServerGone):
    """The connection has ended before a byte of an answer. The server may have the request."""


class RelayedAnswer:
    """The answer of a server: its head, then its body in pieces."""

    def __init__(self, line: ServerLine) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self._line = line
        self._pieces: deque[bytes] = deque()
        self._has_head = False
        self._has_end = False  # the headers define the end of the body; else the connection does
        self._server_keeps = False  # the connection, for a further request
        self._head_bytes = 0
        self._fault = ""  # what the answer is that cannot be passed on
        self._parser = httptools.HttpResponseParser(self)

    async def read(self) -> bytes:
        """Wait for the next piece; empty at the end. Raises `ServerGone`."""
        while not self._pieces and not self.is_complete:
            await self._receive()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece

    async def read_all(self, most: int) -> bytes:
        """The whole body. Raises `ServerGone`, also for more than `most` bytes."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.read():
            size += len(piece)
            if size > most:
                raise ServerGone(f"it answers with more than {most:,} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def read_head(self) -> None:
        """Wait for the head. Raises `ServerGone`; EOFError if there was not a single byte."""
        while not self._has_head:
            await self._receive()

    def close(self) -> None:
        """Release the connection: it is kept if the answer is complete, else closed."""
        if self.is_complete and self._has_end and self._server_keeps:
            self._line.keep()
        else:
            self._line.close()

    async def _receive(self) -> None:
        try:
            data = await self._line.reader.read(READ_BYTES)
        except OSError as exc:
            if not self._head_bytes:
                raise EOFError from exc
            raise ServerGone(f"the connection broke off: {exc}") from exc
        if not data:
            self._ended()
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ServerGone("the head of its answer has no end")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # its status is a fault
        except httptools.HttpParserError as exc:
            raise ServerGone(f"it does not answer in HTTP: {exc}") from exc
        if self._fault:
            raise ServerGone(self._fault)

    def _ended(self) -> None:
        if self._has_head and not self._has_end:
            self.is_complete = True
        elif self._head_bytes:
            raise ServerGone("the connection broke off")
        else:
            raise EOFError

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if self._has_head:
            self._fault = "it answers twice"
            return
        if status in INTERIM:
            self.headers.clear()
            return
        if status not in FINAL:
            self._fault = f"it answers with status {status}"
            return
        self.status = status
        self._has_head = True
        names = {name for name, _ in self.headers}
        is_empty = status in (204, 304)
        self._has_end = is_empty or bool(names & {b"content-length", b"transfer-encoding"})
        self._server_keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True


class ServerLine:
    """One connection to a server."""

    def __init__(
        self,
        lines: ServerLines,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.kept_at = 0.0
        self._lines = lines

    @property
    def is_closed(self) -> bool:
        return self.reader.at_eof() or self.writer.is_closing()

    def keep(self) -> None:
        self._lines.keep(self)

    def close(self) -> None:
        self._lines.closed(self)
        self.writer.close()


class ServerLines:
    """The connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        self._prefix = parts.path.encode()
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._kept: list[ServerLine] = []
        self._open: set[ServerLine] = set()  # connections that an answer uses

    async def ask(
        self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> RelayedAnswer:
        """Send a request, and wait for the head of its answer. The caller must close the answer.

        `headers` must not contain the length of the body. Raises `NotReached` and `ServerGone`.
        """
        lines = [b"%s %s%s HTTP/1.1" % (method.encode(), self._prefix, target)]
        for name, value in headers:
            lines.append(b"%s: %s" % (name, value))
        lines.append(b"content-length: %d" % len(body))
        message = b"\r\n".join([*lines, b"", b""]) + body
        line = self._kept_line()
        if line is not None:
            try:
                return await self._ask_on(line, message)
            except NoAnswer:
                if method not in CHANGES_NOTHING:
                    raise
        return await self._ask_on(await self._connect(), message)

    async def _ask_on(self, line: ServerLine, message: bytes) -> RelayedAnswer:
        self._open.add(line)
        answer = RelayedAnswer(line)
        try:
            line.writer.write(message)
            await line.writer.drain()
            await answer.read_head()
        except (OSError, EOFError) as exc:
            line.close()
            raise NoAnswer("the connection was closed before an answer") from exc
        except BaseException:
            line.close()
            raise
        return answer

    def keep(self, line: ServerLine) -> None:
        if line.is_closed or len(self._kept) >= MAX_KEPT:
            line.close()
            return
        self._open.discard(line)
        line.kept_at = time.monotonic()
        self._kept.append(line)

    def closed(self, line: ServerLine) -> None:
        self._open.discard(line)

    def break_off(self, why: str) -> None:
        """End all open answers with `ServerGone`."""
        for line in self._open:
            line.reader.set_exception(ServerGone(why))

    def close(self) -> None:
        """Close the unused connections."""
        while self._kept:
            self._kept.pop().close()

    def _kept_line(self) -> ServerLine | None:
        while self._kept:
            line = self._kept.pop()
            if not line.is_closed and time.monotonic() - line.kept_at < KEPT_S:
                return line
            line.close()
        return None

    async def _connect(self) -> ServerLine:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except TimeoutError as exc:
            raise NotReached(f"no connection in {CONNECT_S:g} s") from exc
        except OSError as exc:
            raise NotReached(f"no connection: {exc.strerror or exc}") from exc
        return ServerLine(self, reader, writer)

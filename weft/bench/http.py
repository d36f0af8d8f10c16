"""Minimal HTTP/1.1 for a load generator: one request per connection, and its streamed answer.

It is implemented here so that users need not install a package, and so that little happens between
the arrival of a byte and the reading of the clock: bytes are parsed in the callback of the event
loop, without waking a task. A load generator on the server's machine takes processor time from the
server. The client knows nothing of models or figures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any

from weft.bench.error_text import error_text
from weft.config.server_url import server_url

Take = Callable[[bytes], None]  # gets bytes as they arrive; an exception from it ends the answer
Headers = dict[str, str]  # by lower-case names
TakeHead = Callable[[Headers], None]  # gets the headers of an answer before its body

MAX_HEAD_BYTES = 1 << 20
MAX_ERROR_BYTES = 200  # of an answer's body, quoted in an error message
MAX_REFUSAL_BYTES = 100_000  # of the body of an error that are read


class HttpError(Exception):
    """The server could not be reached, or did not answer in HTTP, or answered with an error."""


class HttpClient:
    """The client of a server, by its URL."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises SettingsError if `url` is not a URL."""
        self._url = server_url("URL", url)
        self._ssl: ssl.SSLContext | None = None
        if self._url.scheme == "https":
            self._ssl = ssl.create_default_context()
        self._headers = {"Host": self._url.netloc, "Connection": "close", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def get_json(self, path: str) -> Any:
        """GET JSON. Raises HttpError."""
        content: list[bytes] = []
        await self._send("GET", path, b"", content.append)
        try:
            return json.loads(b"".join(content))
        except ValueError as exc:
            raise HttpError(f"{path} of {self._url.netloc} answers no JSON") from exc

    async def first_model(self) -> Any:
        """What the server says of its first model, with its `id`. Raises HttpError."""
        models = await self.get_json("/v1/models")
        try:
            model = models["data"][0]
            str(model["id"])
        except (LookupError, TypeError) as exc:
            raise HttpError(f"{self._url.netloc} lists no model as the OpenAI API does") from exc
        return model

    async def stream(
        self, path: str, body: bytes, take: Take, *, head: TakeHead | None = None
    ) -> None:
        """Post JSON, and pass the data of each server-sent event to `take`, up to the end; before
        that, the headers to `head`. Raises HttpError."""
        await self._send("POST", path, body, EventParser(take).push, head)

    async def _send(
        self, method: str, path: str, body: bytes, take: Take, take_head: TakeHead | None = None
    ) -> None:
        """Send a request and wait for the end of its answer. `take` gets the body in pieces."""
        headers = self._headers | {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
        }
        target = self._url.path.rstrip("/") + path
        lines = [f"{method} {target} HTTP/1.1"]
        for name, value in headers.items():
            lines.append(f"{name}: {value}")
        head = "\r\n".join([*lines, "", ""])
        loop = asyncio.get_running_loop()
        answer = _Answer(take, loop.create_future(), take_head)
        try:
            transport, _ = await loop.create_connection(
                lambda: answer,
                self._url.hostname or "",
                self._port,
                ssl=self._ssl,
            )
        except OSError as exc:
            raise HttpError(f"cannot reach {self._url.geturl()}: {exc.strerror or exc}") from exc
        try:
            transport.write(head.encode() + body)
            await answer.ended
        except (OSError, EOFError, ValueError, IndexError) as exc:
            raise HttpError(f"the answer of {self._url.geturl()}{path} broke off: {exc}") from exc
        finally:
            transport.close()
        if answer.status != 200:
            quoted = answer.refusal[:MAX_ERROR_BYTES].decode(errors="replace")
            reason = error_text(answer.refusal, quoted)
            raise HttpError(f"{path} answers {answer.status}: {reason}")

    @property
    def _port(self) -> int:
        if self._url.port:
            return self._url.port
        if self._ssl:
            return 443
        return 80


class EventParser:
    """Finds the data of server-sent events in the pieces of a body."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._rest = b""  # the beginning of an incomplete line

    def push(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())


class _Answer(asyncio.Protocol):
    """Parses an answer. Its body goes to `take`, or into `refusal` if the status is not 200."""

    def __init__(
        self, take: Take, ended: asyncio.Future[None], take_head: TakeHead | None = None
    ) -> None:
        self.ended = ended
        self._take_head = take_head
        self.status = 0  # 0: the head has not arrived
        self.refusal = b""
        self._take = take
        self._is_chunked = False
        self._rest = b""  # an incomplete head or chunk

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            if self._rest:
                data = self._rest + data
            self._push(data)
        except Exception as exc:
            self.ended.set_exception(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        has_status = self.status != 0
        # A body without chunks ends with the connection, because we ask the server to close it.
        if exc is None and has_status and not self._is_chunked:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc or EOFError("the connection was closed"))

    def _push(self, data: bytes) -> None:
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise ValueError("the head of the answer has no end")
                self._rest = data
                return
            lines = data[:end].lower().split(b"\r\n")
            self.status = int(lines[0].split()[1])
            codings = [line for line in lines if line.startswith(b"transfer-encoding:")]
            self._is_chunked = any(b"chunked" in line for line in codings)
            if self._take_head is not None:
                self._take_head(_headers(lines[1:]))
            data = data[end + 4 :]
            self._rest = b""
        if self._is_chunked:
            self._push_chunks(data)
        elif data:
            self._body(data)

    def _push_chunks(self, data: bytes) -> None:
        # 5;extension CRLF hello CRLF 0 CRLF CRLF
        #  |               |    |     a length of 0 ends the body
        #  size   content_at    content_end
        chunk_at = 0
        while True:
            line_end = data.find(b"\r\n", chunk_at)
            if line_end < 0:
                break
            size, _, _ = data[chunk_at:line_end].partition(b";")
            length = int(size, 16)
            content_at = line_end + 2
            content_end = content_at + length
            if not length:
                self.ended.set_result(None)
                return
            if len(data) < content_end + 2:
                break
            self._body(data[content_at:content_end])
            chunk_at = content_end + 2
        self._rest = data[chunk_at:]

    def _body(self, piece: bytes) -> None:
        if self.status == 200:
            self._take(piece)
        else:
            self.refusal = (self.refusal + piece)[:MAX_REFUSAL_BYTES]


def _headers(lines: list[bytes]) -> Headers:
    headers: Headers = {}
    for line in lines:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip()] = value.strip()
    return headers

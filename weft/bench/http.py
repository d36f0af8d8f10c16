"""Just enough HTTP/1.1 for a load generator:
one request over one connection, and what is answered, as it comes.

The point of writing this down instead of importing it is that nothing is installed, and that little
happens between a byte's arrival and the clock's reading: what has come is taken apart where the
event loop hands it over, without a task being woken.
A load generator on the machine of the server takes its time from the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

Take = Callable[[bytes], None]  # gets bytes as they come; what it raises ends the answer

MAX_HEAD_BYTES = 1 << 20
MAX_ERROR_BYTES = 200  # of an answer that is told in a message


class HttpError(Exception):
    """The server could not be reached, or what it says is no HTTP, or an error."""


class HttpClient:
    """A server by its URL."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url: SplitResult = urlsplit(url if "://" in url else f"http://{url}")
        self._ssl = ssl.create_default_context() if self._url.scheme == "https" else None
        self._headers = {"Host": self._url.netloc, "Connection": "close", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def get_json(self, path: str) -> Any:
        """Raises HttpError."""
        content: list[bytes] = []
        await self._send("GET", path, b"", content.append)
        return json.loads(b"".join(content))

    async def stream(self, path: str, body: bytes, take: Take) -> None:
        """Post JSON, and hand the data of each server-sent event to `take`, up to the end.
        Raises HttpError.
        """
        await self._send("POST", path, body, EventParser(take).push)

    async def _send(self, method: str, path: str, body: bytes, take: Take) -> None:
        """Until the body of the answer, which `take` gets in pieces, has ended."""
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
        answer = _Answer(take, loop.create_future())
        host = self._url.hostname or ""
        port = self._url.port or (443 if self._ssl else 80)
        try:
            transport, _ = await loop.create_connection(lambda: answer, host, port, ssl=self._ssl)
        except OSError as exc:
            raise HttpError(f"cannot reach {self._url.geturl()}: {exc}") from exc
        try:
            transport.write(head.encode() + body)
            await answer.ended
        except (OSError, EOFError, ValueError, IndexError) as exc:
            raise HttpError(f"the answer of {self._url.geturl()}{path} broke off: {exc}") from exc
        finally:
            transport.close()
        if answer.status != 200:
            refusal = answer.refusal.decode(errors="replace")
            raise HttpError(f"{path} answers {answer.status}: {refusal}")


class EventParser:
    """Finds the data of server-sent events in the pieces of a body."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._rest = b""  # the beginning of a line

    def push(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())


class _Answer(asyncio.Protocol):
    """Takes an answer apart. Its body goes to `take`,
    or becomes the `refusal` if the status is not 200.
    """

    def __init__(self, take: Take, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self.status = 0  # 0: the head has not come
        self.refusal = b""
        self._take = take
        self._is_chunked = False
        self._rest = b""  # what has come of a head or a chunk that is not whole

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._push(self._rest + data if self._rest else data)
        except Exception as exc:
            self.ended.set_exception(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        if exc is None and self.status and not self._is_chunked:  # for we ask to have it closed
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc or EOFError("the connection was closed"))

    def _push(self, data: bytes) -> None:
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise ValueError("its head has no end")
                self._rest = data
                return
            lines = data[:end].lower().split(b"\r\n")
            self.status = int(lines[0].split()[1])
            codings = [line for line in lines if line.startswith(b"transfer-encoding:")]
            self._is_chunked = any(b"chunked" in line for line in codings)
            data = data[end + 4 :]
            self._rest = b""
        if self._is_chunked:
            self._push_chunks(data)
        elif data:
            self._body(data)

    def _push_chunks(self, data: bytes) -> None:
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            length = int(data[at:line_end].partition(b";")[0], 16)
            begin = line_end + 2
            if not length:
                self.ended.set_result(None)
                return
            if len(data) < begin + length + 2:
                break
            self._body(data[begin : begin + length])
            at = begin + length + 2
        self._rest = data[at:]

    def _body(self, piece: bytes) -> None:
        if self.status == 200:
            self._take(piece)
        else:
            self.refusal = (self.refusal + piece)[:MAX_ERROR_BYTES]

"""Just enough HTTP/1.1 for a load generator: one request over one connection, and the body as it comes.

The point of writing this down instead of importing it is that nothing is installed, and that little happens between a
byte's arrival and the clock's reading.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

MAX_LINE_BYTES = 1 << 20


class HttpError(Exception):
    """The server could not be reached, or what it says is no HTTP."""


class Answer(NamedTuple):
    status: int
    body: AsyncIterator[bytes]  # pieces as they come


class Server:
    """A server by its URL."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url: SplitResult = urlsplit(url if "://" in url else f"http://{url}")
        self._headers = {"Host": self._url.netloc, "Connection": "close", "Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @asynccontextmanager
    async def send(self, method: str, path: str, body: object = None) -> AsyncIterator[Answer]:
        """Send a request, JSON if there is a body. Raises HttpError, also while the answer is read."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Length": str(len(content)), "Content-Type": "application/json"}
        lines = [f"{method} {self._url.path.rstrip('/')}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        try:
            reader, writer = await asyncio.open_connection(
                self._url.hostname,
                self._url.port or (443 if self._url.scheme == "https" else 80),
                ssl=ssl.create_default_context() if self._url.scheme == "https" else None,
                limit=MAX_LINE_BYTES,
            )
        except OSError as exc:
            raise HttpError(f"cannot reach {self._url.geturl()}: {exc}") from exc
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + content)
            status, is_chunked = await _head(reader)
            yield Answer(status, _pieces(reader, is_chunked))
        except (OSError, EOFError, ValueError, IndexError) as exc:
            raise HttpError(f"the answer of {self._url.geturl()}{path} broke off: {exc}") from exc
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def get_json(self, path: str) -> Any:
        """Raises HttpError, also for a status that is not 200."""
        async with self.send("GET", path) as answer:
            content = b"".join([piece async for piece in answer.body])
            if answer.status != 200:
                raise HttpError(f"{path} answers {answer.status}: {content[:200]!r}")
            return json.loads(content)


async def events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, as they come."""
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    status = int((await reader.readline()).split()[1])
    is_chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        is_chunked |= line.startswith(b"transfer-encoding:") and b"chunked" in line
    return status, is_chunked


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:  # up to the end of the connection, for we ask to have it closed
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while length := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(length)
        await reader.readexactly(2)

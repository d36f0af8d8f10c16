"""A small HTTP client of one request a connection, which can do what clients do wrong: leave,
stall, send half."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from types import TracebackType


class Lost(Exception):
    """The connection ended before the answer was whole."""


class Exchange:
    """One request and its answer. Use as an async context manager; leaving it closes the
    connection."""

    def __init__(
        self,
        port: int,
        method: str,
        path: str,
        body: object = None,
        *,
        receive_buffer: int = 0,
        half: bool = False,
    ) -> None:
        """`body`: bytes are sent as they are, all else as JSON. `half`: the second half of it is
        never sent."""
        self._port = port
        self._receive_buffer = receive_buffer
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._request = head.encode() + (data[: len(data) // 2] if half else data)
        self.status = 0
        self._headers: dict[str, str] = {}

    async def __aenter__(self) -> Exchange:
        """Raises `ConnectionRefusedError` if nobody listens, `Lost` if the connection ends while it
        is sent."""
        peer = socket.socket()
        peer.setblocking(False)
        if self._receive_buffer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", self._port))
            limit = self._receive_buffer or 1 << 16
            self._reader, self._writer = await asyncio.open_connection(
                sock=peer, limit=max(limit, 1 << 12)
            )
        except BaseException:
            peer.close()
            raise
        try:
            self._writer.write(self._request)
            await self._writer.drain()
        except OSError as exc:
            self._writer.close()
            raise Lost("while sending") from exc
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close at once, with a reset instead of an orderly end."""
        peer = self._writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()

    async def head(self) -> int:
        """The status."""
        line = await self._line()
        self.status = int(line.split()[1])
        while line := (await self._line()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            self._headers[name.lower()] = value.strip()
        return self.status

    def header(self, name: str) -> str:
        """A header of the answer by its name in small letters; empty if there is none."""
        return self._headers.get(name, "")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, behind `head`."""
        if self._headers.get("transfer-encoding") != "chunked":
            if length := int(self._headers.get("content-length", "0")):
                yield await self._exactly(length)
            return
        while length := int(await self._line(), 16):
            yield await self._exactly(length)
            await self._exactly(2)
        await self._line()

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def read_raw(self, most: int) -> bytes:
        """Up to so many bytes as they are on the wire; none at the end, orderly or not."""
        try:
            return await self._reader.read(most)
        except OSError:
            return b""

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except OSError as exc:
            raise Lost(str(exc)) from exc
        if not line.endswith(b"\n"):
            raise Lost("the connection was closed")
        return line

    async def _exactly(self, length: int) -> bytes:
        try:
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as exc:
            raise Lost("the connection was closed") from exc


async def call(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """One request that is waited for. Returns status and body."""
    async with Exchange(port, method, path, body) as exchange:
        status = await exchange.head()
        return status, await exchange.whole()

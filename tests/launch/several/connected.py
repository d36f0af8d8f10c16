"""A connection on which a whole request has arrived (`server/http/protocol.py`), and requests that
come by one to an application."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp


class Connection:
    is_receiving = False
    takes_pieces = True

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.answered = self
        self.pieces: list[bytes] = []

    def admit(self) -> bool:
        return True

    def write_piece(self, body: bytes) -> None:
        self.pieces.append(body)


class Got(NamedTuple):
    status: int
    body: bytes

    @property
    def fields(self) -> Any:
        return msgspec.json.decode(self.body)


async def ask(app: ASGIApp, path: str, body: bytes, *, is_whole: bool = True) -> Got:
    """Send a request without an HTTP client. `is_whole`: its body is there when it begins."""
    unread = [body] if is_whole else [body[len(body) // 2 :], body[: len(body) // 2]]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if unread:
            piece = unread.pop()
            return {"type": "http.request", "body": piece, "more_body": bool(unread)}
        await asyncio.Event().wait()
        raise AssertionError("nobody disconnects")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    if is_whole:
        scope["weft.connection"] = Connection(body)
    await app(scope, receive, send)
    return Got(sent[0]["status"], b"".join(one.get("body", b"") for one in sent))

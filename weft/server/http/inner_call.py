"""Asks a route of this server from within: a request without a connection.

It passes the same handlers as one from outside, behind the checks of keys and connections, which
whoever caused it has passed already.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.types import ASGIApp, Message, Scope

from weft.batches.forms.protocol import RouteAnswer
from weft.observe.request_context import RequestContext, current
from weft.observe.survivable import is_survivable
from weft.server.errors import error_json, translated
from weft.server.http.middleware import OnRefusal

NOBODY = ("background", 0)  # the address of the client


class InnerCall:
    """Calls `app`, the routes of the server. A key without a name is the tenant "background".
    `on_refusal` is called for requests that are answered with an error."""

    def __init__(self, app: ASGIApp, on_refusal: OnRefusal) -> None:
        self._app = app
        self._on_refusal = on_refusal

    async def __call__(self, owner: str, path: str, body: bytes, rid: str) -> RouteAnswer:
        """See `batches.runner.Call`."""
        exchange = _Exchange(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": NOBODY,
            "server": None,
            "app": self._app,
            "weft.rid": rid,
            "weft.key": owner,
        }
        task = asyncio.create_task(self._run(scope, exchange, owner, rid))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            exchange.leave()
            await asyncio.gather(task, return_exceptions=True)
            raise
        return exchange.answer(rid, scope.get("weft.code") or "")

    async def _run(self, scope: Scope, exchange: _Exchange, owner: str, rid: str) -> None:
        request = RequestContext(rid, time.perf_counter(), "", owner or "background")
        current.set(request)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            error = translated(exc)
            exchange.status = error.status
            exchange.pieces = [error_json(error)]
            scope["weft.code"] = error.code
        if "weft.error" in scope:
            self._on_refusal(request, scope["path"], exchange.status, scope["weft.error"])


class _Exchange:
    """The body of a request, and what comes back."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self.status = 500
        self.pieces: list[bytes] = []

    def leave(self) -> None:
        """The client waits no longer."""
        self._left.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body = self._body
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.pieces.append(message.get("body", b""))

    def answer(self, rid: str, code: str) -> RouteAnswer:
        body = b"".join(self.pieces)
        try:
            fields = msgspec.json.decode(body)
        except msgspec.DecodeError:
            fields = {"error": {"message": body[:1_000].decode(errors="replace")}}
        return RouteAnswer(self.status, fields, rid, code)

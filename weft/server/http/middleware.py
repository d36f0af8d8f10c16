"""What every request passes on its way in and out, routed or not: its name, the size of its head, its key, the metrics,
and the audit line of an administrative call.

    client ─▶ CORS ─▶ RequestMiddleware ─▶ router ─▶ Endpoint ─▶ handler

Bare ASGI, and one wrapper around `send` for all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.config.limits import Limits
from weft.observe.garbage import Trim
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.request_context import RequestContext, current, is_safe_name, new_name
from weft.observe.survivable import is_survivable
from weft.server.auth import Access, Keys
from weft.server.errors import ApiError, error_response, over

log = EventLog("server")
audit = EventLog("audit")


class RequestMiddleware:
    """The outermost application. `route_of` gives a path's template and who may use it; unknown paths are "other"."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        limits: Limits,
        route_of: Callable[[str], tuple[str, Access]],
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._route_of = route_of
        self._memory = Trim()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = self._keys.tenant(scope, headers)
        call = RequestContext(
            self._name(headers), time.perf_counter(), headers.get("traceparent", ""), tenant
        )
        current.set(call)  # for this request alone: each has a task of its own
        scope["weft.rid"] = call.rid
        scope["weft.key"] = self._keys.key_name(headers)
        route, access = self._route_of(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        out = _Outgoing(scope, send, call)
        if access == "admin":
            out.on_status = lambda status: self._audit(scope, headers, method, status)
        self._metrics.http_began(route, method)
        try:
            try:
                await self._answer(scope, headers, access, receive, out)
            except BaseException as exc:
                if not is_survivable(exc):
                    raise
                answer = error_response(exc)  # logs it
                if not out.status:
                    await answer(scope, receive, out)
            if out.is_early:
                await self._drain(receive, out)
        finally:
            status = out.status or 499  # 499: the client left before its answer
            self._metrics.http_ended(route, status, time.perf_counter() - call.arrived_s)
            if scope.get("weft.large_body"):
                self._memory.soon()
            if scope.get("weft.limit"):
                self._metrics.refused(scope["weft.limit"])
            if not out.status:
                out.on_status(status)

    async def _answer(
        self, scope: Scope, headers: Headers, access: Access, receive: Receive, out: _Outgoing
    ) -> None:
        refusal = self._refusal(scope, headers, access)
        if refusal is not None:
            await error_response(refusal)(scope, receive, out)
        else:
            await self._app(scope, receive, out)

    def _refusal(self, scope: Scope, headers: Headers, access: Access) -> ApiError | None:
        refusal = self._oversized(scope) or self._keys.refusal(scope, headers, access)
        if refusal is not None or access not in (
            "user",
            "admin",
        ):  # health is told whatever happens
            return refusal
        return self._overloaded(scope)

    def _overloaded(self, scope: Scope) -> ApiError | None:
        connection: RequestConnection | None = scope.get("weft.connection")
        if connection is None or connection.admit():
            return None
        most = self._limits.max_connections
        headers = {"retry-after": "1", "connection": "close"}
        message = f"there are more than {most:,} connections"
        return ApiError(503, message, headers=headers, limit="max_connections")

    def _audit(self, scope: Scope, headers: Headers, method: str, status: int) -> None:
        """One line for each administrative call, let through or not: what, by whom, and how it ended. It is written
        before the client hears of the end."""
        client = scope.get("client")
        write = audit.info if status < 400 else audit.warning
        write(
            "admin_call",
            method=method,
            path=scope["path"],
            key=self._keys.fingerprint(headers),
            client=client[0] if client else "unix socket",
            status=status,
        )

    def _name(self, headers: Headers) -> str:
        """The client's name for the request, if it is harmless; else a new one."""
        name = headers.get("x-request-id", "")
        return name if len(name) <= self._limits.max_rid_len and is_safe_name(name) else new_name()

    def _oversized(self, scope: Scope) -> ApiError | None:
        limits = self._limits
        url_len = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if url_len > limits.max_url_bytes:
            return over(
                "max_url_bytes",
                f"the URL is longer than {limits.max_url_bytes:,} bytes",
                status=414,
            )
        headers = scope["headers"]
        if len(headers) > limits.max_headers:
            return over(
                "max_headers", f"there are more than {limits.max_headers} headers", status=431
            )
        if sum(len(name) + len(value) for name, value in headers) > limits.max_header_bytes:
            message = f"the headers are larger than {limits.max_header_bytes:,} bytes"
            return over("max_header_bytes", message, status=431)
        return None

    async def _drain(self, receive: Receive, out: _Outgoing) -> None:
        """Read on for a moment, throwing away what comes, then end the answer, and with it the connection."""
        left = int(self._limits.linger_mb * 1_000_000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_s):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    left -= len(message.get("body", b""))
        await out.end()


class RequestConnection(Protocol):
    """What a request comes in by (`server/http/protocol.py`)."""

    def admit(self) -> bool: ...

    def done(self) -> None: ...

    @property
    def is_receiving(self) -> bool: ...


_METHODS = frozenset(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])


class _Outgoing:
    """`send`, with the request's name added to the headers and the status kept.

    The end of an answer that comes before the end of the body is held back until the client has had time to read it:
    it is still sending, and a closed connection would throw the answer away. Then the connection is closed, so nobody
    keeps one by a body without end.
    """

    def __init__(self, scope: Scope, send: Send, call: RequestContext) -> None:
        self._connection: RequestConnection | None = scope.get("weft.connection")
        self._send = send
        self._call = call
        self.status = 0
        self.is_early = False
        self.on_status: Callable[[int], None] = _unheard

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                *message.get("headers", ()),
                (b"x-request-id", self._call.rid.encode("ascii")),
                (
                    b"x-content-type-options",
                    b"nosniff",
                ),  # what a model wrote is never taken for a page
            ]
            if self._connection is not None and self._connection.is_receiving:
                self.is_early = True
                self._connection.done()
                headers.append((b"connection", b"close"))
            message["headers"] = headers
            self.on_status(self.status)
        elif self.is_early:
            message = {**message, "more_body": True}
        return self._send(message)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _unheard(status: int) -> None:
    """Nobody listens."""


async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    """No WebSockets here, and nothing to do at start and end."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})

"""The outermost layer: every request passes it on its way in and out, whatever its route.

    client ─▶ CORS ─▶ RequestMiddleware ─▶ router ─▶ Endpoint ─▶ handler

It gives the request its name, checks its head and its key, counts it, and writes the audit line of
an administrative call. Bare ASGI, with one wrapper around `send` for all of this. It does not know
bodies or routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.config.limits import Limits
from weft.observe.garbage import Trim
from weft.observe.log import EventLog
from weft.observe.metrics import HttpMetrics
from weft.observe.request_context import RequestContext, current, is_safe_name
from weft.observe.survivable import is_survivable
from weft.server.auth import Access, Caller, Keys, key_fingerprint
from weft.server.errors import ApiError, error_response
from weft.server.limits import head_refusal
from weft.text.turns import STOPPING

log = EventLog("server")
audit = EventLog("audit")
_METHODS = frozenset(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
MAX_ELSEWHERE_LEN = 256  # of the words of `weft route` about another server
CLIENT_LEFT = 499  # status in metrics and audit of a request whose client left before its answer
TOO_LATE_OR_MANY = (408, 429)  # statuses of which the history tells also for administrative calls


# Is called for a request that was answered with an error: with its route, status and message.
OnRefusal = Callable[[RequestContext, str, int, str], None]


class EdgeMetrics(Protocol):
    """The metrics that the middleware updates."""

    http: HttpMetrics

    def refused(self, limit: str) -> None:
        """Count a refusal because of this limit, a field of `config.limits.Limits`."""


class RequestMiddleware:
    """The outermost application. `route_of` returns a path's template and its access;
    `on_refusal` is called for user routes, and for all that are too late or too many."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: EdgeMetrics,
        limits: Limits,
        route_of: Callable[[str], tuple[str, Access]],
        on_refusal: OnRefusal = lambda request, route, status, message: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._route_of = route_of
        self._on_refusal = on_refusal
        self._memory = Trim()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = self._keys.caller(scope, headers)
        began_s = time.perf_counter()
        came_s: float = scope.get("weft.came_s", began_s)
        request = RequestContext(
            self._name(headers),
            came_s,
            headers.get("traceparent", ""),
            caller.tenant,
            headers.get("x-weft-elsewhere", "")[:MAX_ELSEWHERE_LEN],
            {"front_busy": began_s - came_s},
        )
        current.set(request)  # only for this request: each has its own task
        scope["weft.rid"] = request.rid
        scope["weft.key"] = caller.key_name
        scope["weft.edge"] = self._keys, caller
        scope["app"] = self._app  # so that a router raises for unknown paths and methods
        route, access = self._route_of(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        out = _Outgoing(scope, send, request)
        if access == "admin":
            out.on_status = partial(_audit, scope, headers, method)
        metrics = self._metrics.http
        metrics.active.inc()
        metrics.requests.labels(route, method).inc()
        try:
            await self._answer(
                scope,
                headers,
                caller,
                access,
                receive,
                out,
            )
            if out.is_early:
                await self._drain(receive, out)
        finally:
            status = out.status or CLIENT_LEFT
            metrics.active.dec()
            metrics.responses.labels(route, str(status)).inc()
            metrics.seconds.of(route).observe_one(time.perf_counter() - request.arrived_s)
            if scope.get("weft.large_body"):
                self._memory.soon()
            if (access == "user" or status in TOO_LATE_OR_MANY) and "weft.error" in scope:
                self._on_refusal(request, route, status, scope["weft.error"])
            if scope.get("weft.limit"):
                self._metrics.refused(scope["weft.limit"])
            if not out.status and out.on_status is not None:
                out.on_status(status)

    def _name(self, headers: Headers) -> str:
        """The client's name for the request, if it is safe; else a new name."""
        name = headers.get("x-request-id", "")
        if name and len(name) <= self._limits.max_rid_len and is_safe_name(name):
            return name
        return uuid.uuid4().hex

    async def _answer(
        self,
        scope: Scope,
        headers: Headers,
        caller: Caller,
        access: Access,
        receive: Receive,
        out: _Outgoing,
    ) -> None:
        try:
            refusal = self._refusal(scope, headers, caller, access)
            if refusal is None:
                await self._app(scope, receive, out)
            else:
                await error_response(refusal)(scope, receive, out)
        except asyncio.CancelledError:
            if out.status:
                raise
            # Only the server cancels a request: it ends, and does not wait for this one.
            stopped = ApiError(503, STOPPING, headers={"connection": "close"})
            await error_response(stopped)(scope, receive, out)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            answer = error_response(exc)  # logs it
            if not out.status:
                await answer(scope, receive, out)

    def _refusal(
        self, scope: Scope, headers: Headers, caller: Caller, access: Access
    ) -> ApiError | None:
        """The reason to refuse a request: its head, its key, or too many connections; or None."""
        refusal = head_refusal(self._limits, scope)
        if refusal is None:
            refusal = self._keys.refusal(scope, headers, access, caller)
        if refusal is not None:
            return refusal
        if access not in ("user", "admin"):
            return None  # health checks are answered under any load
        connection: RequestConnection | None = scope.get("weft.connection")
        if connection is None or connection.admit():
            return None
        return self._overloaded()

    def _overloaded(self) -> ApiError:
        most = self._limits.max_connections
        headers = {"retry-after": "1", "connection": "close"}
        message = f"there are more than {most:,} connections"
        return ApiError(503, message, headers=headers, limit="max_connections")

    async def _drain(self, receive: Receive, out: _Outgoing) -> None:
        """Read and drop the rest of the body for a moment; then end the answer and the
        connection."""
        left = int(self._limits.linger_mb * 1_000_000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_s):
                while left > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    left -= len(message.get("body", b""))
        await out.end()


def _audit(scope: Scope, headers: Headers, method: str, status: int) -> None:
    """Write one line for each administrative call, allowed or refused: the call, the key and
    client, and the status.

    It is written before the client receives the status.
    """
    client = scope.get("client")
    write = audit.info if status < 400 else audit.warning
    write(
        "admin_call",
        method=method,
        path=scope["path"],
        key=key_fingerprint(headers),
        client=client[0] if client else "unix socket",
        status=status,
    )


class RequestConnection(Protocol):
    """The connection of a request (`server/http/protocol.py`)."""

    def admit(self) -> bool:
        """Whether the request may be processed; False if too many connections work."""

    def done(self) -> None:
        """The server has finished its work for the request."""

    @property
    def is_receiving(self) -> bool:
        """Whether the end of the request has not arrived yet."""


class _Outgoing:
    """`send` that adds the request's name to the headers and records the status.

    If an answer ends before the body of its request, the end of the answer is delayed until the
    client has had time to read it: the client is still sending, and closing the connection would
    destroy the answer. Then the connection is closed, so a client cannot hold one with an endless
    body.
    """

    def __init__(self, scope: Scope, send: Send, request: RequestContext) -> None:
        self._connection: RequestConnection | None = scope.get("weft.connection")
        self._send = send
        self._request = request
        self.status = 0
        self.is_early = False
        self.on_status: Callable[[int], None] | None = None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                *message.get("headers", ()),
                (b"x-request-id", self._request.rid.encode("ascii")),
                # Browsers must never interpret a model's output as a page.
                (b"x-content-type-options", b"nosniff"),
            ]
            if self._connection is not None and self._connection.is_receiving:
                self.is_early = True
                self._connection.done()
                headers.append((b"connection", b"close"))
            message["headers"] = headers
            if self.on_status is not None:
                self.on_status(self.status)
        elif self.is_early:
            message = {**message, "more_body": True}
        return self._send(message)

    async def end(self) -> None:
        await self._send(
            {
                "type": "http.response.body",
                "body": b"",
                "more_body": False,
            }
        )


async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Close WebSockets; ignore startup and shutdown of the application."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})

"""What every request passes on its way in and out, routed or not: its name, the size of its head, its key, the metrics.

    client ─▶ CORS ─▶ Edge ─▶ router ─▶ Endpoint ─▶ handler

Bare ASGI, and one wrapper around `send` for all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.server.auth import Access, Keys
from weft.server.errors import ApiError, error_response
from weft.server.limits import (
    LINGER_BYTES,
    LINGER_S,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_RID_LEN,
    MAX_URL_BYTES,
)

log = EventLog("server")


class Edge:
    """The outermost application. `route_of` gives a path's template and who may use it; unknown paths are "other"."""

    def __init__(
        self, app: ASGIApp, keys: Keys, metrics: Metrics, route_of: Callable[[str], tuple[str, Access]]
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope, receive, send)
            return
        headers = Headers(scope=scope)
        rid = _request_id(headers)
        scope["weft.rid"] = rid
        route, access = self._route_of(scope["path"])
        method = scope["method"] if scope["method"] in _METHODS else "other"
        out = _Outgoing(send, rid)
        self._metrics.http_began(route, method)
        try:
            refusal = _oversized(scope) or self._keys.refusal(scope, headers, access)
            if refusal is not None:
                if access == "admin":
                    log.warning("admin_refused", rid=rid, path=route, status=refusal.status)
                await error_response(refusal)(scope, receive, out)
            else:
                await self._app(scope, receive, out)
            if out.is_early:
                await _linger(receive, out)
        except Exception as exc:
            answer = error_response(exc)  # logs it
            if not out.status:
                await answer(scope, receive, out)
        finally:
            self._metrics.http_ended(route, out.status or 499)  # 499: the client left before its answer


_METHODS = frozenset(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])


class _Outgoing:
    """`send`, with the request's name added to the headers and the status kept.

    The end of a 413 is held back until the client has had time to read it: it is still sending, and a closed connection
    would throw the answer away.
    """

    def __init__(self, send: Send, rid: str) -> None:
        self._send = send
        self._rid = rid.encode("ascii")
        self.status = 0
        self.is_early = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._rid)]
            if self.status == 413:
                self.is_early = True
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif self.is_early:
            message = {**message, "more_body": True}
        await self._send(message)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive, out: _Outgoing) -> None:
    """Read on for a moment, throwing away what comes, then end the answer."""
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                left -= len(message.get("body", b""))
    await out.end()


def _request_id(headers: Headers) -> str:
    """The client's name for the request, if it is harmless; else a new one."""
    name = headers.get("x-request-id", "")
    if 0 < len(name) <= MAX_RID_LEN and name.isascii() and name.isprintable() and " " not in name:
        return name
    return uuid.uuid4().hex


def _oversized(scope: Scope) -> ApiError | None:
    url_len = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if url_len > MAX_URL_BYTES:
        return ApiError(414, f"the URL is longer than {MAX_URL_BYTES:,} bytes")
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        return ApiError(431, f"there are more than {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        return ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES:,} bytes")
    return None


async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    """No WebSockets here, and nothing to do at start and end."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})

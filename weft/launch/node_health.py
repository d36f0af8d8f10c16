"""The answers to probes on a node that follows node 0: `/health`, `/ping` and `/ready` at `--host`
and `--port`, as on node 0. Everything else is refused: only node 0 serves.

    node's thread        tell, goes_on ─▶ NodeHealth
    thread for probes    an HTTP server ◀── why_not
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.parallel.door import SILENT_WHILE_LOADING_S
from weft.server.errors import ApiError, error_response
from weft.server.serve import make_server

PATHS = ("/health", "/ping", "/ready")
METHODS = ("GET", "HEAD")
MAX_CONNECTIONS = 64
END_S = 2.0  # time for the last answers


class NodeHealth:
    """Whether a node follows, as its own thread tells."""

    def __init__(self, node: int, num_nodes: int) -> None:
        self._name = f"node {node} of {num_nodes}"
        self._why_not = "it waits for node 0"
        self._alive_s = time.monotonic()

    def tell(self, why_not: str) -> None:
        """Set why the node does not follow yet; empty if it follows."""
        self._why_not = why_not

    def goes_on(self) -> None:
        """Note that the node's thread runs."""
        self._alive_s = time.monotonic()

    def why_not(self) -> str:
        """The reason to answer 503; empty for a healthy node."""
        silent_s = time.monotonic() - self._alive_s
        if silent_s > SILENT_WHILE_LOADING_S:
            return f"{self._name}: it has stood still for {silent_s:.0f} s"
        return f"{self._name}: {self._why_not}" if self._why_not else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> ASGIApp:
        if scope["path"] not in PATHS:
            message = f"{self._name} answers only {', '.join(PATHS)}; node 0 serves"
            return error_response(ApiError(404, message))
        if scope["method"] not in METHODS:
            headers = {"allow": ", ".join(METHODS)}
            return error_response(ApiError(405, "Method Not Allowed", headers=headers))
        if why_not := self.why_not():
            return error_response(ApiError(503, why_not, headers={"retry-after": "1"}))
        return Response()


@contextmanager
def answering(health: NodeHealth, listener: socket.socket, config: ServerConfig) -> Iterator[None]:
    """Answer probes on another thread while the body runs."""
    limits = Limits(max_connections=MAX_CONNECTIONS)
    http = make_server(health, config, limits)
    serving = http.serve(sockets=[listener])
    thread = threading.Thread(
        target=asyncio.run, args=(serving,), name="weft-node-health", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        http.should_exit = True
        http.force_exit = True
        thread.join(END_S)

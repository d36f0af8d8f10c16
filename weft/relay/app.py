"""The HTTP application of the front: it answers some paths itself and forwards the others.

GET /health, /ping, /ready   503 while no server takes requests
GET /metrics                 the numbers of the front
administration, live page    refused: each server has its own
everything else              forwarded to a server
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config.keys import KeyDigests
from weft.config.limits import Limits
from weft.config.relay import RelayConfig, RelayServers
from weft.relay.forward import Forwarder
from weft.relay.metrics import RelayMetrics
from weft.relay.pool import RelayPool
from weft.server.app import OPERATIONS, RouteTable
from weft.server.auth import ANY, Keys, Pages
from weft.server.errors import ApiError
from weft.server.http.middleware import RequestMiddleware

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Relay:
    """The front: `app` answers while `watch` runs."""

    def __init__(self, config: RelayConfig, servers: RelayServers) -> None:
        method = config.load_balance_method
        self.prefill: RelayPool | None = None
        if servers.prefill:
            self.prefill = RelayPool("prefill", servers.prefill, method, config.kv_tokens)
        role = "decode" if servers.decode else "worker"
        named = servers.decode or servers.workers
        self.targets = RelayPool(role, named, method, config.kv_tokens)
        self.pools = [pool for pool in (self.prefill, self.targets) if pool is not None]
        self.metrics = RelayMetrics(self.pools)
        self.is_draining = False
        self.limits = Limits(
            max_body_mb=config.max_body_mb,
            max_connections=config.max_connections,
        )
        self._forward = Forwarder(
            self.prefill,
            self.targets,
            self.metrics,
            self.limits,
            config.prefill_wait_s,
        )
        self._table = RouteTable(OPERATIONS)
        # The servers check keys, host names and origins; the front does not.
        anybody = Keys(KeyDigests(), Pages(origins=[ANY], hosts=[ANY]))
        self.app: ASGIApp = RequestMiddleware(
            self._answer,
            anybody,
            self.metrics,
            self.limits,
            self._table.find,
        )

    async def watch(self, probe_s: float) -> None:
        """Probe all servers every `probe_s` seconds, for ever."""
        await asyncio.gather(*(pool.watch(probe_s) for pool in self.pools))

    def close(self) -> None:
        """Close the connections to the servers."""
        for pool in self.pools:
            for server in pool.servers:
                server.lines.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        _, access = self._table.find(path)
        if access == "open":
            answer = self._health()
        elif access == "metrics":
            answer = Response(self.metrics.render(), media_type=METRICS_TYPE)
        elif access == "user":
            await self._forward(scope, receive, send)
            return
        else:
            message = f"this front does not answer {path}; the servers behind it do"
            raise ApiError(403, message)
        await answer(scope, receive, send)

    def _health(self) -> Response:
        if self.is_draining:
            raise ApiError(503, "the front is being stopped", headers={"retry-after": "1"})
        if not self.targets.num_up:
            message = f"no {self.targets.role} server is ready"
            raise ApiError(503, message, headers={"retry-after": "1"})
        return Response()

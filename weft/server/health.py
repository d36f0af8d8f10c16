"""Health checks for supervisors, load balancers and people: the engine is alive, the server accepts
new work, the engine generates."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.engine_state import EngineUnavailable
from weft.messages.control import HealthCheck
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.limits import HEALTH_TIMEOUT_S, require_accepting
from weft.server.operation import get


async def health(context: ServerContext, request: Request) -> ASGIApp:
    """Liveness: 503 while the engine loads, when it hangs, and when it has stopped.

    A draining server is healthy.
    """
    _ = context.client.engine
    return Response()


async def ready(context: ServerContext, request: Request) -> ASGIApp:
    """Readiness: 503 before the first generated token, while the server drains, and while memory of
    the engine is released."""
    _ = context.client.engine
    require_accepting(context.readiness)
    if released := context.client.state.released:
        raise ApiError(503, f"memory of the engine is released: {', '.join(released)}")
    return Response()


async def health_generate(context: ServerContext, request: Request) -> ASGIApp:
    """Whether the engine computes: answers at its next result, whatever is queued. An idle engine
    generates one token for the check."""
    try:
        reply = await context.client.call(HealthCheck(), HEALTH_TIMEOUT_S)
    except EngineUnavailable as exc:
        raise ApiError(503, str(exc)) from exc
    if not reply.success:
        raise failed(503, reply.message)
    return Response()


async def version(context: ServerContext, request: Request) -> ASGIApp:
    return json_response({"version": context.info.version})


ROUTES = (
    get("/health", health, "Whether the engine answers", access="open"),
    get("/ping", health, "The same as /health (SageMaker)", access="open"),
    get("/ready", ready, "Whether new work is accepted", access="open"),
    get("/health_generate", health_generate, "Generate one token"),
    get("/version", version, "Version of weft"),
)

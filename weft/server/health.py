"""Is the engine alive, is new work accepted, does it generate: for supervisors, load balancers and
people.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.client.engine_state import EngineUnavailable
from weft.messages.control import HealthCheck
from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError, failed
from weft.server.limits import HEALTH_TIMEOUT_S
from weft.server.operation import get
from weft.server.submit import require_accepting


async def health(context: ServerContext, request: Request) -> ASGIApp:
    """Is there an engine? 503 while it loads, when it hangs, and when it has stopped.

    A server that drains is well.
    """
    _ = context.client.engine
    return Response()


async def ready(context: ServerContext, request: Request) -> ASGIApp:
    """Readiness: 503 before the first token was generated and while the server drains."""
    _ = context.client.engine
    require_accepting(context)
    if released := context.client.state.released:
        raise ApiError(503, f"memory of the engine is released: {', '.join(released)}")
    return Response()


async def health_generate(context: ServerContext, request: Request) -> ASGIApp:
    """Does the engine compute? Its next result is the answer, whatever waits; if nothing runs, it
    generates a token.
    """
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
    get("/health", health, "Is the engine there?", access="open"),
    get("/ping", health, "The same as /health (SageMaker)", access="open"),
    get("/ready", ready, "Is new work accepted?", access="open"),
    get("/health_generate", health_generate, "Generate one token"),
    get("/version", version, "Version of weft"),
)

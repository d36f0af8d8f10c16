"""What the engine is doing and why: its requests, the story of one, and the books of its memory."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.server.body import json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.numbers import query_number

DEFAULT_LIMIT = 1_000


async def list_requests(context: ServerContext, request: Request) -> ASGIApp:
    """The queue in numbers, and at most `?limit` open requests: those that run, then the queue in its order."""
    reply = await context.client.list_requests(int(query_number(request, "limit", DEFAULT_LIMIT)))
    return json_response({"queue": reply.queue, "requests": reply.requests})


async def explain_request(context: ServerContext, request: Request) -> ASGIApp:
    """What happened to the requests of exactly this name, the newest first; 404 if none is remembered."""
    rid = request.path_params["rid"]
    found = await context.client.explain(rid)
    if not found:
        raise ApiError(
            404, f"no request named {rid[:128]!r} is open or among the last that ended", param="rid"
        )
    return json_response({"requests": [_told(one) for one in found]})


async def audit(context: ServerContext, request: Request) -> ASGIApp:
    """Check the books; `faults` is empty if every page has one owner."""
    answer = msgspec.to_builtins(await context.client.audit())
    return json_response(
        {key: value for key, value in answer.items() if key not in ("type", "call")}
    )


def _told(one: Any) -> dict[str, Any]:
    """An explanation, with its time line also as it reads."""
    return {**msgspec.to_builtins(one), "text": [str(entry) for entry in one.timeline]}

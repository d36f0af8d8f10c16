"""Sessions over HTTP: opened and closed by routes of their own, as SGLang's clients do it, and named by requests.

Whoever may generate may have sessions: they need the user's key, not that of administration. A session belongs to the
key that opened it: for any other there is none of that id. An id that is not given is made of 128 random bits; without
keys, who knows a session's id may continue it.
"""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
)
from weft.observe.log import EventLog
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext, owner_of
from weft.server.errors import ApiError
from weft.server.fields.session import checked_session_id

log = EventLog("sessions")


class OpenSessionBody(msgspec.Struct, kw_only=True):
    """Open a session. Capacities count tokens, under SGLang's name, too."""

    session_id: str | None = None
    capacity: int | None = None
    capacity_of_str_len: int | None = None
    timeout: float | None = None  # seconds without a request


class CloseSessionBody(msgspec.Struct, kw_only=True):
    """Close a session."""

    session_id: str


async def open_session(context: ServerContext, request: Request) -> ASGIApp:
    """The id of a new session, as a JSON string; 400 says why there is none."""
    body = await read_json(context, request, OpenSessionBody)
    context.require_accepting()
    capacity = _capacity(body)
    id = (
        uuid.uuid4().hex
        if body.session_id is None
        else checked_session_id(context, body.session_id, "session_id")
    )
    reply = await context.client.call(
        lambda call: OpenSession(
            call=call,
            session_id=id,
            owner=owner_of(request),
            capacity=capacity,
            timeout_s=body.timeout or 0.0,
        ),
        OpenSessionReply,
    )
    log.info("open_session", session=id, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message, param="session_id")
    return json_response(id)


async def close_session(context: ServerContext, request: Request) -> ASGIApp:
    """Whether there was such a session; 200 also if there was none, for it may just have run out of time."""
    body = await read_json(context, request, CloseSessionBody)
    id = checked_session_id(context, body.session_id, "session_id")
    reply = await context.client.call(
        lambda call: CloseSession(call=call, session_id=id, owner=owner_of(request)),
        CloseSessionReply,
    )
    log.info("close_session", session=id, success=reply.success)
    answer = {"success": reply.success, "message": reply.message}
    return json_response(answer)


def _capacity(body: OpenSessionBody) -> int:
    given = {body.capacity, body.capacity_of_str_len} - {None}
    if len(given) > 1:
        raise ApiError(
            400, "capacity and capacity_of_str_len are the same; give one of them", param="capacity"
        )
    return next(iter(given), None) or 0

"""Sessions over HTTP: opened and closed by their own routes, as SGLang's clients expect.

Sessions need the user's key, not the administration key: every client that may generate may have
sessions. A session belongs to the key that opened it: to any other key its id is unknown. A default
id has 128 random bits; without keys, a client that knows a session's id may continue it.
"""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.messages.by_name import plain
from weft.messages.sessions import CloseSession, OpenSession
from weft.observe.log import EventLog
from weft.server.auth import owner_of
from weft.server.body import json_response, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.fields.session import checked_session_id
from weft.server.limits import require_accepting
from weft.server.operation import post

log = EventLog("sessions")


# A body cannot set the owner of a session, so these are not messages of `weft.messages`.
class OpenSessionBody(msgspec.Struct, kw_only=True):
    """Open a session. A capacity is a number of tokens, also under SGLang's name."""

    session_id: str | None = None
    capacity: int | None = None
    capacity_of_str_len: int | None = None
    timeout: float | None = None  # seconds without a request


class CloseSessionBody(msgspec.Struct, kw_only=True):
    """Close a session."""

    session_id: str


async def open_session(context: ServerContext, request: Request) -> ASGIApp:
    """The id of a new session, as a JSON string; a 400 gives the reason if none is opened."""
    body = await read_json(context, request, OpenSessionBody)
    require_accepting(context.readiness)
    capacity = _capacity(body)
    id = body.session_id
    if id is None:
        id = uuid.uuid4().hex
    else:
        id = checked_session_id(context, id, "session_id")
    opening = OpenSession(
        id, owner=owner_of(request), capacity=capacity, timeout_s=body.timeout or 0.0
    )
    if context.sessions is not None:
        context.sessions.require_room()
    reply = await context.client.call(opening)
    log.info("open_session", session=id, success=reply.success)
    if not reply.success:
        raise ApiError(400, reply.message, param=_name_in_body(reply.wrong, body))
    await _settle(context)
    return json_response(id)


async def close_session(context: ServerContext, request: Request) -> ASGIApp:
    """Whether the session existed.

    Status 200 also if it did not exist, because it may just have expired.
    """
    body = await read_json(context, request, CloseSessionBody)
    id = checked_session_id(context, body.session_id, "session_id")
    reply = await context.client.call(CloseSession(id, owner=owner_of(request)))
    log.info("close_session", session=id, success=reply.success)
    await _settle(context)
    return json_response(plain(reply))


async def _settle(context: ServerContext) -> None:
    if context.sessions is not None:
        await context.sessions.settled()


def _name_in_body(field: str, body: OpenSessionBody) -> str | None:
    """Where the body has a field of `OpenSession`; None: nowhere."""
    if field == "capacity" and body.capacity is None:
        return "capacity_of_str_len"
    return {"session_id": "session_id", "capacity": "capacity", "timeout_s": "timeout"}.get(field)


def _capacity(body: OpenSessionBody) -> int:
    """Tokens; 0 if the body gives none."""
    if body.capacity is None:
        return body.capacity_of_str_len or 0
    if body.capacity_of_str_len not in (None, body.capacity):
        message = "capacity and capacity_of_str_len are the same; give one of them"
        raise ApiError(400, message, param="capacity")
    return body.capacity


ROUTES = (
    post("/open_session", open_session, "Open a session (SGLang)", OpenSessionBody),
    post("/close_session", close_session, "Close a session (SGLang)", CloseSessionBody),
)

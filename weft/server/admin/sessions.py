"""Sessions over HTTP: opened and closed by routes of their own, as SGLang's clients do it, and named by requests.

Whoever may generate may have sessions: they need the user's key, not that of administration. A session belongs to the
key that opened it: for any other there is none of that id. An id that is not given is made of 128 random bits; without
keys, who knows a session's id may continue it.
"""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    OpenSession,
    OpenSessionReply,
    SessionParams,
)
from weft.observe.log import EventLog
from weft.server.body import json_bytes, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.limits import over
from weft.server.tenants import owner_of

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


class SessionFields(msgspec.Struct, kw_only=True):
    """`session_params`: the session of a request, and the turn that it continues."""

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


async def open_session(context: ServerContext, request: Request) -> ASGIApp:
    """The id of a new session, as a JSON string; 400 says why there is none."""
    body = await read_json(context, request, OpenSessionBody)
    context.require_accepting()
    capacity = _capacity(body)
    id = (
        uuid.uuid4().hex
        if body.session_id is None
        else _checked_id(context, body.session_id, "session_id")
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
    return Response(json_bytes(id), media_type="application/json")


async def close_session(context: ServerContext, request: Request) -> ASGIApp:
    """Whether there was such a session; 200 also if there was none, for it may just have run out of time."""
    body = await read_json(context, request, CloseSessionBody)
    id = _checked_id(context, body.session_id, "session_id")
    reply = await context.client.call(
        lambda call: CloseSession(call=call, session_id=id, owner=owner_of(request)),
        CloseSessionReply,
    )
    log.info("close_session", session=id, success=reply.success)
    answer = {"success": reply.success, "message": reply.message}
    return Response(json_bytes(answer), media_type="application/json")


def session_params(
    context: ServerContext, request: Request, fields: SessionFields | None, *, n: int
) -> SessionParams | None:
    """The session of a request with `n` completions, if it names one. Raises `ApiError`."""
    if fields is None:
        return None
    if n != 1:
        raise ApiError(400, f"n is {n}; a request of a session has one completion", param="n")
    return SessionParams(
        id=_checked_id(context, fields.id, "session_params.id"),
        owner=owner_of(request),
        rid=fields.rid or "",
        offset=fields.offset or 0,
        replace=bool(fields.replace),
        drop_previous_output=bool(fields.drop_previous_output),
        bos_token_id=context.tokenizer.bos_token_id,
    )


def _capacity(body: OpenSessionBody) -> int:
    given = {body.capacity, body.capacity_of_str_len} - {None}
    if len(given) > 1:
        raise ApiError(
            400, "capacity and capacity_of_str_len are the same; give one of them", param="capacity"
        )
    return next(iter(given), None) or 0


def _checked_id(context: ServerContext, id: str, param: str) -> str:
    longest = context.limits.max_rid_len
    if len(id) > longest:
        raise over(
            "max_rid_len",
            f"{param} has {len(id):,} characters; at most {longest:,} are allowed",
            param=param,
        )
    if not id or not id.isprintable():
        raise ApiError(400, f"{param} must be 1 to {longest} printable characters", param=param)
    return id

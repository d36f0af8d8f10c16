"""The field `session_params`: the session that a request continues, under SGLang's names.

`server/admin/sessions.py` opens and closes sessions.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from weft.messages.sessions import SessionParams
from weft.server.auth import owner_of
from weft.server.context import ServerContext
from weft.server.errors import ApiError, over


class SessionFields(msgspec.Struct, kw_only=True):
    """`session_params`: the session of a request, and the turn that it continues."""

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


def session_params(
    context: ServerContext,
    request: Request,
    fields: SessionFields,
    *,
    n: int,
) -> SessionParams:
    """The session of a request with `n` completions. Raises `ApiError`."""
    if n != 1:
        message = f"n is {n}; a request of a session has one completion"
        raise ApiError(400, message, param="n")
    return SessionParams(
        id=checked_session_id(context, fields.id, "session_params.id"),
        owner=owner_of(request),
        rid=fields.rid or "",
        offset=fields.offset or 0,
        replace=bool(fields.replace),
        drop_previous_output=bool(fields.drop_previous_output),
        bos_token_id=context.tokenizer.bos_token_id,
    )


def checked_session_id(context: ServerContext, id: str, param: str) -> str:
    """`id`, if it is a valid name of a session. Raises `ApiError`, which names `param`."""
    longest = context.limits.max_rid_len
    if len(id) > longest:
        message = f"{param} has {len(id):,} characters; at most {longest:,} are allowed"
        raise over("max_rid_len", message, param=param)
    if not id or not id.isprintable():
        message = f"{param} must be 1 to {longest} printable characters"
        raise ApiError(400, message, param=param)
    return id

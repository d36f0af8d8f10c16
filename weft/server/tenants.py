"""Whose a request is: the API key that it came with, and whom the scheduler serves with it.

A key goes by its name, never by itself (`config/keys.py`). What belongs to somebody (sessions, stored
responses) belongs to a key. A client cannot invent a key, so it gains nothing by names of its own,
unless the operator lets the `user` of a request count (`--tenant-by user`).
"""

from __future__ import annotations

from starlette.requests import Request

from weft.server.context import ServerContext

KEY_END = "\x1e"  # stands in no name of a key


def owner_of(request: Request) -> str:
    """The name of the key that came; empty for all where no key is asked for."""
    return str(request.scope.get("weft.key", ""))


def user_of(context: ServerContext, user: str | None) -> str:
    """What a request says of its user, cut to what is kept."""
    return (user or "")[: context.limits.max_user_len]


def tenant_of(context: ServerContext, request: Request, user: str | None) -> str:
    """Whom the policy `fair` serves with the request."""
    key, name = owner_of(request), user_of(context, user)
    if context.config.tenant_by == "key" or not name:
        return key
    return f"{key}/{name}" if key else name


def salt_of(context: ServerContext, request: Request, salt: str) -> str:
    """The part of the prefix cache that a request may share: within its key, if the server isolates keys."""
    return f"{owner_of(request)}{KEY_END}{salt}" if context.config.isolate_cache_by_key else salt

"""Whose a request is: the API key that it came with, and whom the scheduler serves with it.

A key goes by its name, never by itself (`config/keys.py`). What belongs to somebody (sessions, stored
responses) belongs to a key. A client cannot invent a key, so it gains nothing by names of its own,
unless the operator lets the `user` of a request count (`--tenant-by user`).
"""

from __future__ import annotations

from starlette.requests import Request

from weft.server.info import Front

KEY_END = "\x1e"  # stands in no name of a key


def owner_of(request: Request) -> str:
    """The name of the key that came; empty for all where no key is asked for."""
    return str(request.scope.get("weft.key", ""))


def user_of(front: Front, user: str | None) -> str:
    """What a request says of its user, cut to what is kept."""
    return (user or "")[: front.limits.max_user_len]


def tenant_of(front: Front, request: Request, user: str | None) -> str:
    """Whom the policy `fair` serves with the request."""
    key, name = owner_of(request), user_of(front, user)
    if front.config.tenant_by == "key" or not name:
        return key
    return f"{key}/{name}" if key else name


def salt_of(front: Front, request: Request, salt: str) -> str:
    """The part of the prefix cache that a request may share: within its key, if the server isolates keys."""
    return f"{owner_of(request)}{KEY_END}{salt}" if front.config.isolate_cache_by_key else salt

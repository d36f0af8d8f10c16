"""Who may use which route. A key is kept and compared as its SHA-256, in time that does not depend on it.

Every path needs the user's key, unknown ones too, except those marked open. Administration needs a key of its own;
where none is set it answers on loopback only, and there not to pages of other origins that a browser has open.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from weft.config.server import ServerConfig
from weft.server.errors import ApiError

Access = Literal["open", "user", "admin"]


class Keys:
    """The keys of one server."""

    def __init__(self, config: ServerConfig) -> None:
        self._user = _digest(config.api_key) if config.api_key else None
        self._admin = _digest(config.admin_api_key) if config.admin_api_key else None

    def refusal(self, scope: Scope, headers: Headers, access: Access) -> ApiError | None:
        """Why this request is refused, if it is."""
        if access == "open":
            return None
        given = _digest(_given_key(headers))
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        is_user = self._user is None or hmac.compare_digest(given, self._user)
        if not (is_user or is_admin):
            return ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if access == "admin" and not is_admin:
            if self._admin is not None:
                return ApiError(403, "this route needs the administration key")
            if not _is_local(scope, headers):
                return ApiError(403, "this route answers on loopback only; set --admin-api-key to use it from afar")
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given_key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the request comes from this machine, not through a proxy, and not from a page of somewhere else."""
    client = scope.get("client")
    if client is not None and not _is_loopback(client[0]):  # no address: a unix socket
        return False
    if "x-forwarded-for" in headers or "forwarded" in headers:
        return False
    origin = headers.get("origin")
    return origin is None or _is_loopback(urlsplit(origin).hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

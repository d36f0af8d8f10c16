"""Who may use which route. A key is kept and compared as its SHA-256, with every key that there is, so that the time
tells neither which one it was nor how much of it was right.

Every path needs the user's key, unknown ones too, except those marked open. Administration needs a key of its own;
where no key at all is set it answers on loopback. It never answers to pages of other origins that a browser has open.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from weft.config.keys import KeyDigests, digest
from weft.server.errors import ApiError

Access = Literal["open", "metrics", "user", "admin"]


class Keys:
    """The keys of one server. `origins` are those whose pages may administrate, with the key."""

    def __init__(self, digests: KeyDigests, *, open_metrics: bool = False, origins: Iterable[str] = ()) -> None:
        self._user = digests.user
        self._admin = digests.admin
        self._open = {"open", "metrics"} if open_metrics else {"open"}
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope, headers: Headers, access: Access) -> ApiError | None:
        """Why this request is refused, if it is."""
        if access in self._open:
            return None
        given = digest(_given_key(headers))
        is_admin = _is_among(given, self._admin)
        is_user = _is_among(given, self._user) or not self._user
        if not (is_user or is_admin):
            return ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return self._admin_refusal(scope, headers, is_admin) if access == "admin" else None

    def fingerprint(self, headers: Headers) -> str:
        """A name for the key that came, for the log; which one it is can be found out only with the key at hand."""
        given = _given_key(headers)
        return f"sha256:{digest(given).hex()[:8]}" if given else "none"

    def _admin_refusal(self, scope: Scope, headers: Headers, is_admin: bool) -> ApiError | None:
        if not is_admin:
            if self._admin:
                return ApiError(403, "this route needs the administration key")
            if self._user:
                return ApiError(403, "this route needs the administration key, and there is none: set --admin-api-key")
            if not _is_local(scope, headers):
                return ApiError(403, "this route answers on loopback only; set --admin-api-key to use it from afar")
        if not self._is_own_page(headers):
            return ApiError(403, "this route does not answer to pages of other origins")
        return None

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether no browser sent this, or it did for a page of this server, or of an allowed origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return origin in self._origins or urlsplit(origin).netloc == headers.get("host", "")


def _is_among(given: bytes, digests: tuple[bytes, ...]) -> bool:
    found = False
    for one in digests:  # all of them
        found |= hmac.compare_digest(given, one)
    return found


def _given_key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the request comes from this machine, not through a proxy, and under a name of this machine: a page could
    give itself an address of ours, but not one of our names."""
    client = scope.get("client")
    if client is not None and not _is_loopback(client[0]):  # no address: a unix socket
        return False
    if "x-forwarded-for" in headers or "forwarded" in headers:
        return False
    return client is None or _is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

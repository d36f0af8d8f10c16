"""Who may use which route. A key is kept and compared as its SHA-256, with every key that there is, so that the time
tells neither which one it was nor how much of it was right.

Every path needs the user's key, unknown ones too, except those marked open. Administration needs a key of its own;
where no key at all is set it answers on loopback. What is answered without a key is answered under names of ours and
not to pages of other origins (`pages.py`); administration never answers to these.
"""

from __future__ import annotations

import hmac
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from weft.config.keys import KeyDigests, digest
from weft.server.errors import ApiError
from weft.server.pages import Pages, host_name, is_forwarded, is_loopback

Access = Literal["open", "metrics", "user", "admin"]


class Keys:
    """The keys of one server, and the pages and names that it answers to where it asks for none."""

    def __init__(self, digests: KeyDigests, pages: Pages, *, open_metrics: bool = False) -> None:
        self._digests = digests
        self._user = digests.user
        self._admin = digests.admin
        self._pages = pages
        self._open = {"open", "metrics"} if open_metrics else {"open"}

    def refusal(self, scope: Scope, headers: Headers, access: Access) -> ApiError | None:
        """Why this request is refused, if it is."""
        if access == "open" and self._user:
            return None  # it tells nothing, and a balancer may ask for any name
        given = digest(_given_key(headers))
        is_admin = _is_among(given, self._admin)
        has_key = _is_among(given, self._user) or is_admin
        if self._user and not has_key and access not in self._open:
            return ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not has_key:
            refusal = self._pages.refusal(headers, is_probe=access == "open")
            if refusal is not None:
                return refusal
        return self._admin_refusal(scope, headers, is_admin) if access == "admin" else None

    def fingerprint(self, headers: Headers) -> str:
        """A name for the key that came, for the log; which one it is can be found out only with the key at hand."""
        given = _given_key(headers)
        return f"sha256:{digest(given).hex()[:8]}" if given else "none"

    def key_name(self, headers: Headers) -> str:
        """The name of the key that came, if it is one of those that are accepted."""
        given = digest(_given_key(headers))
        is_known = _is_among(given, self._user) | _is_among(given, self._admin)
        return self._digests.name(given) if is_known else ""

    def tenant(self, scope: Scope, headers: Headers) -> str:
        """Who shares in what has to be shared: a name for the key, where keys are asked for, else the address."""
        if self._user:
            return self.key_name(headers)
        client = scope.get("client")
        return client[0] if client else ""

    def _admin_refusal(self, scope: Scope, headers: Headers, is_admin: bool) -> ApiError | None:
        if not is_admin:
            if self._admin:
                return ApiError(403, "this route needs the administration key")
            if self._user:
                return ApiError(
                    403,
                    "this route needs the administration key, and there is none: set --admin-api-key",
                )
            if not _is_local(scope, headers):
                return ApiError(
                    403,
                    "this route answers on loopback only, and not through a proxy; --admin-api-key opens it",
                )
        if not self._pages.is_own(headers):
            return ApiError(403, "this route does not answer to pages of other origins")
        return None


def _is_among(given: bytes, digests: tuple[bytes, ...]) -> bool:
    found = False
    for one in digests:  # all of them
        found |= hmac.compare_digest(given, one)
    return found


def _given_key(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the request comes from this machine, not through a proxy, and under a name of this machine.

    A proxy that says nothing of itself speaks HTTP/1.0 unless it is told otherwise, which no program of today does.
    """
    client = scope.get("client")
    if is_forwarded(headers) or scope.get("http_version", "1.1") != "1.1":
        return False
    if client is None:
        return True  # a unix socket
    return is_loopback(client[0]) and is_loopback(host_name(headers.get("host", "")))

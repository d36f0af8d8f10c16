"""Access to routes: API keys, the administration key, and the origins and host names of this
server.

A key is stored as its SHA-256 and compared with every known key, so that the time of the check
shows neither which key matched nor how much of it was right. Every path needs the user's key, also
unknown paths. Exceptions are routes marked open, and the live page, which contains no data.
Administration needs its own key; if no key at all is set, it answers on loopback.

Requests without a key are answered only under this server's own names, and not to pages of other
origins: a browser sends requests for every page that it has open, and any page may give a name of
its own to this machine's address. Programs other than browsers send neither `Origin` nor
`Sec-Fetch-Site`, so this does not affect them. Administration never answers to pages of other
origins. This module reads only heads, and knows no route.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from weft.config.keys import KeyDigests, digest
from weft.server.errors import ApiError

Access = Literal["open", "page", "metrics", "user", "admin"]

ANY = "*"
UNSPECIFIED = ("0.0.0.0", "::")  # addresses that lead to this machine, from itself
# Headers that proxies, load balancers and content networks add: one of them shows that the client
# is elsewhere. Clients themselves send tracing headers (`traceparent`, `x-b3-...`,
# `x-request-id`), so these say nothing.
FORWARDING = frozenset(
    {
        "client-ip",
        "forwarded",
        "forwarded-for",
        "incap-client-ip",
        "proxy-client-ip",
        "surrogate-capability",
        "true-client-ip",
        "via",
        "wl-proxy-client-ip",
        "x-client-ip",
        "x-cloud-trace-context",
        "x-coming-from",
        "x-cluster-client-ip",
        "x-forward-for",
        "x-forwarded",
        "x-host",
        "x-http-forwarded-for",
        "x-nginx-proxy",
        "x-queue-start",
        "x-remote-addr",
        "x-remote-ip",
        "x-request-start",
        "x-scheme",
        "x-ssl-client-cert",
        "x-ssl-client-verify",
        "x-varnish",
    }
)
FORWARDING_PREFIXES = (
    "cdn-",
    "cf-",
    "fastly-",
    "fly-",
    "x-akamai-",
    "x-amzn-",
    "x-amz-cf-",
    "x-appengine-",
    "x-arr-",
    "x-azure-",
    "x-envoy-",
    "x-forwarded-",
    "x-nf-",
    "x-original-",
    "x-proxy-",
    "x-proxyuser-",
    "x-real-",
    "x-vercel-",
)
_HOST = re.compile(r"[\w.:\[\]-]*")


class Caller(NamedTuple):
    """The sender of a request, as its key identifies it."""

    # For logs and metrics: the name of the key if the server requires keys, else the address of the
    # client. The policy `fair` never counts addresses (`server/requests.py::sharing_of`).
    tenant: str = ""
    key_name: str = ""  # name of the request's key, if the server accepts it
    is_user: bool = False
    is_admin: bool = False


def owner_of(request: Request) -> str:
    """The name of a request's key; empty for all requests if the server requires no key.

    Sessions and stored responses belong to this name. A client cannot invent a key.
    """
    return str(request.scope.get("weft.key", ""))


def administers(request: Request) -> bool:
    """Whether the sender of a request may also use the routes of administration."""
    if "weft.edge" not in request.scope:
        return False  # a request of the server itself
    keys, caller = request.scope["weft.edge"]
    return keys.refusal(request.scope, request.headers, "admin", caller) is None


class Keys:
    """The keys of one server; for requests without a key, also its origins and host names."""

    def __init__(
        self,
        digests: KeyDigests,
        pages: Pages,
        *,
        open_metrics: bool = False,
    ) -> None:
        self._digests = digests
        self._pages = pages
        self._open = {"open", "page", "metrics"} if open_metrics else {"open", "page"}
        self._has_keys = bool(digests.user or digests.admin)

    def caller(self, scope: Scope, headers: Headers) -> Caller:
        client = scope.get("client")
        address = client[0] if client else ""
        if not self._has_keys:
            return Caller(address)
        key = digest(_key_of(headers))
        # Compared with all keys of both groups, whatever matches.
        is_user = _is_among(key, self._digests.user)
        is_admin = _is_among(key, self._digests.admin)
        name = ""
        if is_user or is_admin:
            name = self._digests.name(key)
        tenant = name if self._digests.user else address
        return Caller(tenant, name, is_user, is_admin)

    def refusal(
        self, scope: Scope, headers: Headers, access: Access, caller: Caller
    ) -> ApiError | None:
        """The reason to refuse this request, or None."""
        needs_key = bool(self._digests.user)
        if access == "open" and needs_key:
            return None  # the answer has no data, and a load balancer may use any name
        has_key = caller.is_user or caller.is_admin
        if needs_key and not has_key and access not in self._open:
            return ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if not has_key and not (access == "page" and needs_key):
            refusal = self._pages.refusal(headers, is_probe=access == "open")
            if refusal is not None:
                return refusal
        if access == "admin":
            return self._admin_refusal(scope, headers, caller)
        return None

    def _admin_refusal(
        self,
        scope: Scope,
        headers: Headers,
        caller: Caller,
    ) -> ApiError | None:
        if not caller.is_admin:
            if self._digests.admin:
                return ApiError(403, "this route needs the administration key")
            if self._digests.user:
                return ApiError(
                    403,
                    "this route needs the administration key, and there is none: "
                    "set --admin-api-key",
                )
            if not _is_local(scope, headers):
                return ApiError(
                    403,
                    "this route answers on loopback only, and not through a proxy; "
                    "--admin-api-key opens it",
                )
        if not self._pages.is_own(headers):
            return ApiError(403, "this route does not answer to pages of other origins")
        return None


def key_fingerprint(headers: Headers) -> str:
    """A name for the key of a request, for the log.

    It identifies a key only to someone who has that key.
    """
    key = _key_of(headers)
    return f"sha256:{digest(key).hex()[:8]}" if key else "none"


def _is_among(key: bytes, digests: tuple[bytes, ...]) -> bool:
    found = False
    for one in digests:  # always all of them
        found |= hmac.compare_digest(key, one)
    return found


def _key_of(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key", "")  # the latter is Azure's


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Whether the request comes from this machine, without a proxy, and to one of its loopback
    names.

    A proxy that does not announce itself speaks HTTP/1.0 unless it is configured otherwise; no
    program of today does that.
    """
    client = scope.get("client")
    if is_forwarded(headers) or scope.get("http_version", "1.1") != "1.1":
        return False
    if client is None:
        return True  # a unix socket
    return is_loopback(client[0]) and is_loopback(host_name(headers.get("host", "")))


# ---- origins and host names


class Pages:
    """The origins and host names of one server."""

    def __init__(
        self, *, origins: Iterable[str] = (), hosts: Iterable[str] = (), bound: str = "127.0.0.1"
    ) -> None:
        """`origins`: origins whose pages may send requests, `*` for all. `hosts`: additional names
        of this server, also `.example.com` for all names below it and `*` for all names. `bound`:
        the address or name that the server listens on."""
        names = {name.lower() for name in hosts}
        own_names = {"localhost", bound.lower(), socket.gethostname().lower()}
        self._origins = frozenset(origins)
        self._suffixes = tuple(name for name in names if name.startswith("."))
        self._names = frozenset(names | own_names) - {""}
        self._is_shut_in = is_loopback(bound)
        self._is_ours = lru_cache(1_024)(self._look_up)

    def refusal(self, headers: Headers, *, is_probe: bool = False) -> ApiError | None:
        """The reason to refuse a request without a key, or None.

        `is_probe`: a health check, which may use any address.
        """
        for host in headers.getlist("host"):
            if not (self._is_ours(host) or (is_probe and _is_address(host))):
                message = (
                    f"{host[:64]!r} is not a name of this server; name it in --allowed-hosts, or "
                    "set --api-key"
                )
                return ApiError(403, message)
        if self.is_own(headers) or (ANY in self._origins and "origin" in headers):
            return None
        return ApiError(
            403,
            "this server does not answer to pages of other origins; --cors-origins names the "
            "allowed ones",
        )

    def is_own(self, headers: Headers) -> bool:
        """Whether this request does not come from a page of a foreign origin.

        It comes from no browser, or from a page of this server or of an allowed origin.
        """
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        _, _, address = origin.partition("://")
        return origin in self._origins or address == headers.get("host")

    def _look_up(self, host: str) -> bool:
        """Whether `host` is a name of this server.

        A page cannot give itself an address as its name, so every address is accepted, except if
        the server listens on loopback only: then only a loopback address can have been used.
        """
        name = host_name(host)
        if _is_address(host):
            if not self._is_shut_in or is_loopback(name):
                return True
            return name in self._names or name in UNSPECIFIED
        if ANY in self._names or name in self._names or name.endswith(".localhost"):
            return True
        return bool(self._suffixes) and name.endswith(self._suffixes)


def is_from_browser(headers: Headers) -> bool:
    """Whether a page may have sent this: browsers mark requests that can change state."""
    return "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)


def is_forwarded(headers: Headers) -> bool:
    """Whether a proxy declares that it forwards this request for another client."""
    return any(name in FORWARDING or name.startswith(FORWARDING_PREFIXES) for name in headers)


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty if it is invalid."""
    if not _HOST.fullmatch(host):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address refers to loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host_name(host))
    except ValueError:
        return False
    return True

"""Web pages and names that a server without keys does not answer to.

A browser sends requests for every page that it has open, and any page may give a name of its own to this machine's
address. So where no key tells who asks, a request from a page of another origin is refused, and so is one for a name
that is not ours. Programs that are no browsers send neither `Origin` nor `Sec-Fetch-Site`, and are not concerned.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from weft.server.errors import ApiError

ANY = "*"
UNSPECIFIED = ("0.0.0.0", "::")  # addresses that lead to this machine, from itself
FORWARDING = frozenset(
    {
        "forwarded",
        "via",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "client-ip",
        "true-client-ip",
    }
    | {
        "cf-connecting-ip",
        "cf-connecting-ipv6",
        "cf-ray",
        "cdn-loop",
        "fastly-client-ip",
        "fly-client-ip",
    }
    | {
        "x-original-host",
        "x-original-url",
        "x-envoy-external-address",
        "x-amzn-trace-id",
        "x-azure-clientip",
    }
)
_HOST = re.compile(r"[\w.:\[\]-]*")


class Pages:
    """The origins and names of one server."""

    def __init__(
        self, *, origins: Iterable[str] = (), hosts: Iterable[str] = (), bound: str = "127.0.0.1"
    ) -> None:
        """`origins`: those whose pages may ask, `*` for all. `hosts`: names that are ours, also `.example.com` for all
        below it and `*` for all. `bound`: the address or name that the server listens on."""
        self._origins = frozenset(origins)
        names = {name.lower() for name in hosts}
        self._suffixes = tuple(name for name in names if name.startswith("."))
        self._names = frozenset(
            names | {"localhost", bound.lower(), socket.gethostname().lower()}
        ) - {""}
        self._is_shut_in = is_loopback(bound)
        self._is_ours = lru_cache(1_024)(self._look_up)

    def refusal(self, headers: Headers, *, is_probe: bool = False) -> ApiError | None:
        """Why a request is refused that no key speaks for, if it is. `is_probe`: it asks whether the server is well,
        which any address may be used for."""
        for host in headers.getlist("host"):
            if not (self._is_ours(host) or (is_probe and _is_address(host))):
                name = host[:64]
                message = f"{name!r} is no name of this server; --allowed-hosts names those that are, or set --api-key"
                return ApiError(403, message)
        if self.is_own(headers) or (ANY in self._origins and "origin" in headers):
            return None
        return ApiError(
            403,
            "this server does not answer to pages of other origins; --cors-origins names those it may",
        )

    def is_own(self, headers: Headers) -> bool:
        """Whether no browser sent this, or it did for a page of this server, or of an origin that is named."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return origin in self._origins or urlsplit(origin).netloc == headers.get("host", "")

    def _look_up(self, host: str) -> bool:
        """Whether `host` is a name of ours. An address is no name that a page could give, so each will do, unless the
        server listens on loopback alone, where none but loopback's can have been used."""
        name = host_name(host)
        if _is_address(host):
            return (
                not self._is_shut_in
                or is_loopback(name)
                or name in self._names
                or name in UNSPECIFIED
            )
        if ANY in self._names or name in self._names or name.endswith(".localhost"):
            return True
        return bool(self._suffixes) and name.endswith(self._suffixes)


def is_from_browser(headers: Headers) -> bool:
    """Whether a page may have sent this: browsers tell so in requests that can do something."""
    return "origin" in headers or any(name.startswith("sec-fetch-") for name in headers)


def is_forwarded(headers: Headers) -> bool:
    """Whether a proxy says that it passes this on for somebody."""
    return any(name in FORWARDING or name.startswith("x-forwarded-") for name in headers)


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty if it is none."""
    if not _HOST.fullmatch(host):
        return ""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one of this machine alone."""
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

"""The prefill servers that a decode server takes KV from (`--handoff-lenders`), and the hosts that
requests name.

    prefill-0.prefill              this name, at --disaggregation-bootstrap-port
    *.prefill.svc:9000             every name below, at this port
    10.0.0.0/8, [fd00::1]:9000     addresses
    127.0.0.1:*                    any port

Names are compared, never looked up: who answers to a name that a client has chosen is not known
before.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from weft.config.options import SettingsError

MAX_HOST_LEN = 253
ANY_PORT = "*"
EXPECTED = "HOST, HOST:PORT or HOST:* is expected, where HOST is a name, *.NAME, or an address"
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")


class NamedLender(NamedTuple):
    """Which hosts and ports an entry allows."""

    name: str  # of a host, or the end of names that begins with "."; "" if addresses are meant
    network: IPv4Network | IPv6Network | None
    port: int | None  # None: any

    def is_at(self, host: str, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is not None:
            return _is_address_in(self.network, host)
        return host.endswith(self.name) if self.name.startswith(".") else host == self.name


def canonical_host(text: str) -> str:
    """A host name in lower case, or an IP address in its usual form; "" if it is neither.

    What only some resolvers take for an address (`127.1`, `0x7f000001`) is neither, nor is an
    address of one interface (`fe80::1%eth0`).
    """
    host = text.removeprefix("[").removesuffix("]").lower()
    if "%" not in host:
        with suppress(ValueError):
            return str(ip_address(host))
    labels = host.removesuffix(".").split(".")
    is_name = len(host) <= MAX_HOST_LEN and all(map(_LABEL.fullmatch, labels))
    if not is_name or _NUMBER.fullmatch(labels[-1]):
        return ""
    return ".".join(labels)


@cache
def parse_lenders(text: str, port: int) -> tuple[NamedLender, ...]:
    """The entries of `--handoff-lenders`; those without a port are at `port`. Raises
    SettingsError."""
    fault = why_no_lenders(text)
    if fault:
        raise SettingsError(f"--handoff-lenders is {text!r:.200}; {fault}")
    found: list[NamedLender] = []
    for entry in _entries(text):
        lender = _parsed(entry, port)
        assert lender is not None
        found.append(lender)
    return tuple(found)


def why_no_lenders(text: str) -> str:
    """The fault of a text with lenders; "" if it has none."""
    for entry in _entries(text):
        if _parsed(entry, 0) is None:
            return f"{entry!r:.80} is not understood; {EXPECTED}"
    return ""


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _parsed(entry: str, port: int) -> NamedLender | None:
    host, own_port = _apart(entry)
    if own_port == ANY_PORT:
        number = None
    elif not own_port:
        number = port
    elif _PORT.fullmatch(own_port) and 0 < int(own_port) < 65_536:
        number = int(own_port)
    else:
        return None
    with suppress(ValueError):
        return NamedLender("", ip_network(host), number)
    end = host.removeprefix("*")
    if end != host and not end.startswith("."):
        return None
    name = canonical_host(end.removeprefix("."))
    if not name or "[" in host:
        return None
    return NamedLender(f".{name}" if end != host else name, None, number)


def _apart(entry: str) -> tuple[str, str]:
    """Host and port of an entry, as they are written; the port may be missing."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        return host, rest.removeprefix(":")
    if entry.count(":") > 1:  # IPv6 without a port
        return entry, ""
    host, _, port = entry.partition(":")
    return host, port


def _is_address_in(network: IPv4Network | IPv6Network, host: str) -> bool:
    try:
        return ip_address(host) in network
    except ValueError:
        return False

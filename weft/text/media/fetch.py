"""Fetches bytes from another machine or a file, only from places that the operator allows.

A server that fetches addresses of requests gives clients its own place in the network (SSRF). So
the operator must name each host. Its name is resolved once, all its addresses must be public, and
the connection goes to one of the checked addresses. No redirect is followed; no proxy, cookie or
password is used; bytes and time are limited. A file must be below the one folder that the operator
names, after links are resolved.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from weft.text.media.errors import MediaError
from weft.text.media.sources import require_size
from weft.version import __version__

PIECE_BYTES = 1 << 16
MAX_URL_LEN = 8_192
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last four bytes are an IPv4 address

# Only forms that all parsers read alike: no user, no backslash, no space, only ASCII.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][!$-;=?-Z_a-z~%\[\]@]*)?(?:#.*)?",
    re.IGNORECASE | re.ASCII,
)
_PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], Sequence[str]]


class MediaAccess(NamedTuple):
    """The hosts and files that may be read."""

    hosts: frozenset[str] = frozenset()  # as "example.com" or "example.com:8080"
    folder: Path | None = None  # files below it may be read; None: no file
    any_file: bool = False  # for Python programs, which may read any file
    timeout_s: float = 10.0


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host name, from the system's resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Whether the address is public. The IPv4 address inside an IPv6 address counts."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = ip
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.teredo is not None:
            return False
        embedded = ip.ipv4_mapped or ip.sixtofour
        if embedded is None and ip in NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            inner = embedded
        elif int(ip) >> 32 == 0:  # an IPv4-compatible address, the old form of a mapped one
            return False
    return inner.is_global and not inner.is_multicast and not inner.is_reserved


class Fetcher:
    """Fetches the addresses that one `MediaAccess` allows. Calls may run in several threads."""

    def __init__(
        self,
        access: MediaAccess,
        resolve: Resolve = resolve,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        self._access = access
        self._resolve = resolve
        self._is_public = is_public

    def check(self, url: str) -> None:
        """Raise `MediaError` for an address that is not allowed. Nothing is opened or resolved."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "file":
            if not self._access.any_file and self._access.folder is None:
                raise MediaError(
                    "files are not read; --allowed-local-media-path would allow those of a folder"
                )
        elif scheme in _PORTS:
            self._parsed(url)
        else:
            raise MediaError(
                f"it is an address of the kind {url[:16]!r}; data:, https:, http: and file: are "
                "allowed"
            )

    def fetch(
        self,
        url: str,
        max_bytes: int,
    ) -> bytes:
        """The bytes at an address. Raises `MediaError`, or `MediaTooLarge`."""
        self.check(url)
        if url[:5].lower() == "file:":
            return self._read_file(url, max_bytes)
        return self._get(self._parsed(url), max_bytes)

    # ---- other machines

    def _parsed(self, url: str) -> _Target:
        """The parts of an address. Raises `MediaError` for an unusual form or a forbidden host."""
        if not self._access.hosts:
            raise MediaError(
                "addresses are not fetched; --allowed-media-domains would allow those of a host"
            )
        found = _ADDRESS.fullmatch(url) if len(url) <= MAX_URL_LEN else None
        if found is None:
            raise MediaError(
                "its address is not of the form https://HOST/PATH, in ASCII, without a user"
            )
        scheme = found["scheme"].lower()
        host = found["host"].lower().strip("[]")
        port = int(found["port"] or _PORTS[scheme])
        named = {f"{host}:{port}"}
        if port in (_PORTS[scheme], 0):
            named.add(host)
        if not named & self._access.hosts or not 0 < port < 65_536:
            raise MediaError(
                f"its host {host[:128]!r} (port {port}) is none of --allowed-media-domains"
            )
        target = found["target"] or "/"
        if target.startswith("?"):
            target = "/" + target
        return _Target(scheme, host, port, target)

    def _get(
        self,
        target: _Target,
        max_bytes: int,
    ) -> bytes:
        address = self._address_of(target)
        timeout_s = self._access.timeout_s
        # The time-out of a socket limits one read: a host could send single bytes for ever.
        connection = _Dialled(target, address, timeout_s)
        timer = threading.Timer(timeout_s, connection.cut_off)
        timer.daemon = True
        timer.start()
        try:
            return _answer(connection, target, max_bytes)
        except (OSError, http.client.HTTPException) as exc:
            if connection.is_cut_off or isinstance(exc, TimeoutError):
                raise MediaError(f"it did not arrive within {timeout_s:g} s") from exc
            raise MediaError(f"its host did not send it ({type(exc).__name__})") from exc
        finally:
            timer.cancel()
            connection.let_go()

    def _address_of(self, target: _Target) -> str:
        try:
            addresses = self._resolve(target.host, target.port)
        except (OSError, UnicodeError) as exc:
            raise MediaError(f"its host {target.host!r} has no address") from exc
        if not addresses or not all(map(self._is_public, addresses)):
            raise MediaError(f"its host {target.host!r} is not one of the public internet")
        return addresses[0]

    # ---- files

    def _read_file(
        self,
        url: str,
        max_bytes: int,
    ) -> bytes:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaError("its address is not of the form file:///PATH")
        path = unquote(parts.path)
        if "\0" in path or not path.startswith("/"):
            raise MediaError("its address is not of the form file:///PATH")
        real = os.path.realpath(path)
        if not self._access.any_file:
            assert self._access.folder is not None, "checked before"
            root = os.path.realpath(self._access.folder)
            if os.path.commonpath([root, real]) != root:
                raise MediaError("its file is not below the folder of --allowed-local-media-path")
        return _read(real, max_bytes)


def _read(path: str, max_bytes: int) -> bytes:
    """The bytes of a regular file. Opening a pipe or a device does not block, but is an error."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise MediaError("its file cannot be read") from exc
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("its address is not that of a file")
        require_size(status.st_size, max_bytes)
        with open(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    require_size(len(data), max_bytes)
    return data


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    target: str  # path and query


class _Dialled(http.client.HTTPConnection):
    """A connection to the checked address, even if the host's name now resolves to another one."""

    def __init__(
        self,
        target: _Target,
        address: str,
        timeout_s: float,
    ) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self.default_port = _PORTS[target.scheme]
        self.is_cut_off = False
        self._address = address
        self._is_secret = target.scheme == "https"
        # http.client drops its own reference to the socket after the head of the answer.
        self._dialled: socket.socket | None = None

    def connect(self) -> None:
        self._dialled = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_secret:
            context = ssl.create_default_context()
            # The handshake follows later, so that `cut_off` can end it, too.
            secret = context.wrap_socket(
                self._dialled, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._dialled = secret
            secret.do_handshake()
        self.sock = self._dialled

    def let_go(self) -> None:
        """Close the connection and its socket."""
        self.close()
        if self._dialled is not None:
            self._dialled.close()

    def cut_off(self) -> None:
        """End the connection from another thread; the reading thread gets an error."""
        self.is_cut_off = True
        if self._dialled is not None:
            with contextlib.suppress(OSError):  # it has already ended
                self._dialled.shutdown(socket.SHUT_RDWR)


def _answer(
    connection: _Dialled,
    target: _Target,
    max_bytes: int,
) -> bytes:
    headers = {
        "accept": "*/*",
        "accept-encoding": "identity",
        "user-agent": f"weft/{__version__}",
        "connection": "close",
    }
    connection.request("GET", target.target, headers=headers)
    with connection.getresponse() as answer:
        if 300 <= answer.status < 400:
            raise MediaError(
                f"its host answers with a redirect ({answer.status}), which is not followed"
            )
        if answer.status != 200:
            raise MediaError(f"its host answers with status {answer.status}")
        require_size(answer.length or 0, max_bytes)
        pieces: list[bytes] = []
        size = 0
        while piece := answer.read(PIECE_BYTES):
            size += len(piece)
            require_size(size, max_bytes)
            pieces.append(piece)
        if connection.is_cut_off:
            raise TimeoutError
        if answer.length:
            raise MediaError("its host broke off in the middle")
        return b"".join(pieces)
